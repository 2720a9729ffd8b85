"""What the ledger refuses: specs that make no run, and trajectories that would poison one."""

import json
import math
from collections.abc import Iterable, Mapping

import numpy as np
from google.protobuf.message import DecodeError

from rollfarm import images
from rollfarm.errors import InvalidArgument, InvalidTrajectory, RunMismatch, TrajectoryTooLarge
from rollfarm.tokens import LOGPROB
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from sample_buffer import filters, tasks
from sample_buffer.state import Lease

SCORED = (trajectory_pb2.OUTCOME_OK, trajectory_pb2.OUTCOME_TRUNCATED)
GIVEN_BACK = (
    trajectory_pb2.OUTCOME_ENV_FAILED,
    trajectory_pb2.OUTCOME_REWARD_FAILED,
    trajectory_pb2.OUTCOME_ABORTED,
    trajectory_pb2.OUTCOME_CANCELLED,
)

LEAST = {
    "batch_groups": 1,
    "group_size": 1,
    "redundant_members": 0,
    "redundant_groups": 0,
    "step_count": 0,
    "max_attempts": 1,
}
"""The smallest value of each count in a spec."""


def require(**fields: str) -> None:
    """Raise InvalidArgument for the first field that is empty."""
    for name, value in fields.items():
        if not value:
            raise InvalidArgument(f"{name} is empty.", field=name)


def check_spec(spec: sample_buffer_pb2.RunSpec) -> None:
    """Raise InvalidArgument unless the spec makes a run."""
    require(run_id=spec.run_id)
    for name, least in LEAST.items():
        if getattr(spec, name) < least:
            raise InvalidArgument(f"{name} is {getattr(spec, name)}; it is at least {least}.", field=name)
    if not (math.isfinite(spec.alpha) and spec.alpha >= 0):
        raise InvalidArgument(f"alpha is {spec.alpha}; it is a number of at least 0.", field="alpha")
    if spec.lease_duration.ToNanoseconds() <= 0:
        raise InvalidArgument("lease_duration is not longer than 0.", field="lease_duration")
    for name in ("sampling", "validation_sampling"):
        if getattr(spec, name).max_tokens < 1:
            raise InvalidArgument(f"{name}.max_tokens is less than 1.", field=f"{name}.max_tokens")
    _check_domains(spec.domains)
    filters.check(spec.filters)


def _check_domains(domains: Iterable[sample_buffer_pb2.Domain]) -> None:
    names: set[str] = set()
    for domain in domains:
        require(**{"domains.name": domain.name, "domains.environment": domain.environment})
        if domain.name in names:
            raise InvalidArgument(f"Two domains are named {domain.name!r}.", domain=domain.name)
        names.add(domain.name)
        if not (math.isfinite(domain.weight) and domain.weight > 0):
            raise InvalidArgument(
                f"Domain {domain.name!r} has weight {domain.weight}; it is above 0.", domain=domain.name
            )
        if not _is_json_object(domain.settings_json or "{}"):
            raise InvalidArgument(f"settings_json of domain {domain.name!r} is not a JSON object.", domain=domain.name)
    if not names:
        raise InvalidArgument("The run has no domain.", field="domains")


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def check_same(old: sample_buffer_pb2.RunSpec, new: sample_buffer_pb2.RunSpec) -> None:
    """Raise RunMismatch where anything but step_count differs."""
    changed = [
        field.name
        for field in old.DESCRIPTOR.fields
        if field.name != "step_count" and getattr(old, field.name) != getattr(new, field.name)
    ]
    if changed:
        raise RunMismatch(
            f"Run {old.run_id!r} exists with another {', '.join(changed)}.", run_id=old.run_id, fields=",".join(changed)
        )


def parse(payload: bytes) -> trajectory_pb2.Trajectory:
    """The trajectory that was serialised. Raises InvalidTrajectory."""
    try:
        return trajectory_pb2.Trajectory.FromString(payload)
    except DecodeError as error:
        raise InvalidTrajectory(f"The trajectory is not one on the wire: {error}") from None


def check_trajectory(trajectory: trajectory_pb2.Trajectory, lease: Lease, run_id: str, *, newest_version: int) -> int:
    """The tokens that the policy wrote. Raises InvalidTrajectory unless it is what was leased, whole and scored."""
    expected_group = lease.validation_id or tasks.group_id(run_id, lease.position)
    _expect("run_id", trajectory.run_id, run_id)
    _expect("group_id", trajectory.group_id, expected_group)
    _expect("member", trajectory.member, lease.position if lease.validation_id else lease.member)
    if not trajectory.trajectory_id:
        raise InvalidTrajectory("trajectory_id is empty.")
    if trajectory.outcome not in SCORED:
        raise InvalidTrajectory("Only OUTCOME_OK and OUTCOME_TRUNCATED are complete.", outcome=trajectory.outcome)
    if not trajectory.HasField("reward") or not math.isfinite(trajectory.reward):
        reward = trajectory.reward if trajectory.HasField("reward") else "unset"
        raise InvalidTrajectory(f"reward is {reward}, not a finite number.", reward=reward)
    if not trajectory.turns:
        raise InvalidTrajectory("There are no turns.")
    tokens = 0
    versions: list[int] = []
    known: dict[bytes, bytes] = {}
    for number, turn in enumerate(trajectory.turns[:]):  # a slice is a list; without it the end is an IndexError
        tokens += _check_turn(number, turn, versions)
        if turn.images:
            _check_images(number, turn, known)
    oldest, newest = (min(versions), max(versions)) if versions else (lease.version, lease.version)
    if not 0 <= oldest <= newest <= newest_version:
        raise InvalidTrajectory(
            f"Tokens of versions {oldest} to {newest}; the newest version is {newest_version}.",
            version=newest,
            newest_version=newest_version,
        )
    _expect("oldest_policy_version", trajectory.oldest_policy_version, oldest)
    return tokens


def check_size(size_bytes: int, most_bytes: int) -> None:
    """Raise TrajectoryTooLarge for a serialised trajectory over the limit."""
    if size_bytes > most_bytes:
        raise TrajectoryTooLarge(
            f"The trajectory has {size_bytes} bytes; at most {most_bytes} are taken.",
            size_bytes=size_bytes,
            most_bytes=most_bytes,
        )


def _expect(field: str, value: object, expected: object) -> None:
    if value != expected:
        raise InvalidTrajectory(f"{field} is {value!r}; the lease's is {expected!r}.", field=field, value=value)


def _check_turn(number: int, turn: trajectory_pb2.Turn, versions: list[int]) -> int:
    """The tokens that the policy wrote in a whole turn; their versions are added to `versions`."""
    size, logprobs = len(turn.token_ids), turn.logprobs
    if size % 4:
        raise InvalidTrajectory(f"token_ids of turn {number} are not whole int32s.", turn=number)
    if turn.author != trajectory_pb2.AUTHOR_POLICY:
        if logprobs or turn.version_spans:
            raise InvalidTrajectory(f"Turn {number} has log-probs or versions and is not the policy's.", turn=number)
        return 0
    if turn.begins_segment or not number:
        raise InvalidTrajectory(f"Turn {number} is the policy's and begins a segment; a prompt does.", turn=number)
    tokens = size // 4
    if len(logprobs) != size:
        raise InvalidTrajectory(f"Turn {number} has {tokens} tokens and {len(logprobs) / 4:g} log-probs.", turn=number)
    spanned = 0
    for span in turn.version_spans[:]:
        count = span.token_count
        if count < 1:
            raise InvalidTrajectory(f"A version span of turn {number} is empty.", turn=number)
        spanned += count
        versions.append(span.policy_version)
    if tokens != spanned:
        raise InvalidTrajectory(f"The version spans of turn {number} do not sum to its {tokens} tokens.", turn=number)
    # A byte of a mask is 0 or 1, and bytes are searched in less time than numpy takes to begin a reduction.
    if 0 in np.isfinite(np.frombuffer(logprobs, LOGPROB)).tobytes():
        raise InvalidTrajectory(f"A log-prob of turn {number} is not finite.", turn=number)
    return tokens


def _check_images(number: int, turn: trajectory_pb2.Turn, known: dict[bytes, bytes]) -> None:
    """`known` holds the images of the turns before by their SHA-256, and gets those of this one."""
    if turn.author == trajectory_pb2.AUTHOR_POLICY:
        raise InvalidTrajectory(f"Turn {number} is the policy's and has images.", turn=number)
    try:
        images.place(turn.images, len(turn.token_ids) // 4, known)
    except images.BadImage as problem:
        raise InvalidTrajectory(f"In turn {number} {problem}.", turn=number) from None


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are numbers."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
