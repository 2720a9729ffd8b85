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


def test_without_bubblewrap_the_doctor_names_the_next_level_and_how_to_get_the_better_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("rollfarm.sandbox.inside.landlock.version", lambda: 7)
    monkeypatch.setattr("os.getuid", lambda: 1000)

    finding = doctor.sandbox()

    assert finding.found.startswith("landlock; better would be bubblewrap")
    assert "apt-get install bubblewrap" in finding.found
    assert not finding.remedy


def test_without_any_sandbox_the_doctor_says_what_each_level_lacks_and_the_farm_can_run_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    monkeypatch.setattr("rollfarm.sandbox.inside.landlock.version", lambda: 0)

    finding = doctor.sandbox()

    assert finding.found.startswith("none")
    assert all(f"{level}: " in finding.found for level in ("bubblewrap", "landlock", "docker"))
    assert not finding.remedy
