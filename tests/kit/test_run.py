import pytest
from pydantic import ValidationError

from rollfarm.run import DomainConfig, RunConfig, SamplingConfig


def test_the_spec_that_sample_buffer_gets_is_the_configuration():
    run = RunConfig(
        name="a",
        alpha=0.5,
        steps=7,
        domains=[DomainConfig(name="lake", environment="frozen_lake", settings={"size": 4, "goal": "far"})],
        sampling=SamplingConfig(max_tokens=3),
        lease_seconds=1.5,
    )

    spec = run.to_proto()

    assert (spec.run_id, spec.alpha, spec.step_count) == ("a", 0.5, 7)
    assert spec.domains[0].settings_json == '{"goal": "far", "size": 4}'
    assert spec.validation_sampling.max_tokens == 3
    assert spec.lease_duration.ToTimedelta().total_seconds() == 1.5


def test_a_run_name_that_cannot_be_a_folder_is_refused():
    with pytest.raises(ValidationError, match="name"):
        RunConfig(name="../elsewhere")
