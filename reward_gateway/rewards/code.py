"""Code that has to pass tests, run in the sandbox.

What is the policy's own doing is 0: no code, a program that is wrong, crashes, hangs, or uses too much. What is not, is
a failure: no sandbox, a sandbox that breaks, a reference without usable tests.
"""

from typing import Annotated

from pydantic import BaseModel, Field, ValidationError, model_validator

from reward_gateway.rewards.words import last_block, spoken
from rollfarm.reward import Episode, Score, pure


class Tests(BaseModel):
    """What a reference holds, as JSON: pairs of input and output, or tests as code."""

    inputs: list[str] = []
    """What the program reads on stdin, one for each test."""

    outputs: list[str] = []
    """What it has to write on stdout. Space at the ends of lines and of the whole does not matter."""

    asserts: list[str] = []
    """Code that calls what the program defines, and raises when it is wrong, as `assert add(1, 2) == 3` does."""

    setup: str = ""
    """Code before each of `asserts`, such as imports."""

    @model_validator(mode="after")
    def _are_there(self) -> "Tests":
        if len(self.inputs) != len(self.outputs):
            raise ValueError(f"{len(self.inputs)} inputs and {len(self.outputs)} outputs")
        if bool(self.inputs) == bool(self.asserts):
            raise ValueError("either inputs and outputs or asserts are needed")
        return self


@pure
async def code(
    episode: Episode,
    *,
    partial: bool = False,
    seconds: Annotated[float, Field(gt=0, le=60)] = 4.0,
    most_seconds: Annotated[float, Field(gt=0, le=600)] = 20.0,
    megabytes: Annotated[int, Field(ge=64)] = 512,
) -> Score:
    """1 when the policy's last block of Python passes every test of the reference, else 0; with `partial`, the share.

    Each test has `seconds`, and all of them `most_seconds`: those that are left then count as not passed. Raises
    ValueError for a reference without usable tests, SandboxUnavailable and SandboxFailed.
    """
    tests = _read(episode)
    source = last_block(spoken(episode.answer), "python", "py", "python3")
    if source is None:
        return Score(0.0, "no code in the answer")
    # Here, because it brings the sandbox with it, which workers do not need.
    from reward_gateway.rewards.code_runs import Bounds, by_asserts, by_output

    bounds = Bounds(seconds, most_seconds, megabytes * 2**20, partial)
    if tests.inputs:
        faults = await by_output(source, tests.inputs, tests.outputs, bounds)
    else:
        faults = await by_asserts(source, tests.setup, tests.asserts, bounds)
    passed = sum(not fault for fault in faults)
    value = passed / len(faults) if partial else float(passed == len(faults))
    return Score(value, f"{passed} of {len(faults)} tests passed; {next(filter(None, faults), 'none failed')}"[:500])


def _read(episode: Episode) -> Tests:
    try:
        return Tests.model_validate_json(episode.reference)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise ValueError(f"environment {episode.environment!r} gives no usable tests: {problem}") from None
