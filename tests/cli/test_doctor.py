"""What the doctor says of machines that lack something."""

import sys

import pytest

from rollfarm import doctor


def test_a_journal_in_redis_without_its_client_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "sample_buffer.redis_client", raising=False)

    finding = doctor.journal("redis://127.0.0.1:1")

    assert "redis" in finding.found
    assert "pip install '.[buffer]'" in finding.remedy
