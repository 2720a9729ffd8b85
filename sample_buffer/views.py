"""What a run looks like from outside: pure readings of its state, none of which scans history."""

from collections.abc import Callable, Iterator

from rollfarm import times
from rollfarm.errors import InvalidArgument
from rollfarm.v1 import sample_buffer_pb2, trajectory_pb2
from sample_buffer import lengths, tasks
from sample_buffer.groups import Groups
from sample_buffer.state import Batch, Group, Lease, Note, Sums
from sample_buffer.wire import RawGroup

Payload = Callable[[str], bytes]

DEFAULT_PAGE = 50
LARGEST_PAGE = 500
PAGE_BYTES = 16 * 1024 * 1024
"""A page ends early when its trajectories are larger."""


def episode_lease(groups: Groups, lease: Lease) -> sample_buffer_pb2.EpisodeLease:
    """A lease as the worker sees it."""
    spec = groups.spec
    episode = sample_buffer_pb2.Episode(
        run_id=spec.run_id, policy_version=lease.version, attempt=lease.attempt, validation_id=lease.validation_id
    )
    validation = bool(lease.validation_id)
    episode.group_id = lease.validation_id or tasks.group_id(spec.run_id, lease.position)
    episode.member = lease.position if validation else lease.member
    episode.group_size = 1 if validation else spec.group_size
    episode.task.CopyFrom(tasks.task(spec, lease.domain, lease.task_index, validation=validation))
    episode.sampling.CopyFrom(spec.validation_sampling if validation else spec.sampling)
    return sample_buffer_pb2.EpisodeLease(lease_id=lease.lease_id, episode=episode, lease_duration=spec.lease_duration)


def raw_groups(groups: Groups, batch: Batch, payload: Payload) -> list[RawGroup]:
    """The groups of a batch with their stored trajectories."""
    spec = groups.spec
    raw: list[RawGroup] = []
    for group, members in groups.winners(batch):
        head = sample_buffer_pb2.Group(
            group_id=tasks.group_id(spec.run_id, group.index),
            index=group.index,
            task=tasks.task(spec, group.domain, group.task_index),
            oldest_policy_version=group.oldest_version(),
        )
        raw.append(RawGroup(head, [payload(member.lease_id) for member in members]))
    return raw


def status(groups: Groups, now: float) -> sample_buffer_pb2.GetStatusResponse:
    """How the run stands."""
    state, fold = groups.state, groups.fold
    answer = sample_buffer_pb2.GetStatusResponse(
        spec=groups.spec,
        policy_version=state.version,
        next_commit_step=state.next_commit_step,
        next_batch_step=state.next_batch_step,
        credit_count=groups.capacity,
        credits_in_use_count=groups.credits_in_use,
        episode_counts={stage: fold.episodes[stage] for stage in ("pending", "leased", "done")},
        group_counts={"open": len(fold.open), "ready": len(fold.ready), "taken": fold.taken_count},
        dropped_group_counts=state.dropped,
        outcome_counts=outcome_counts(groups),
        staleness_counts=state.staleness,
        max_staleness=max(state.staleness, default=0),
        last_batch_mean_reward=state.last_batch_mean_reward,
        next_group_index=state.next_group,
        committed_trajectory_count=state.committed_trajectories,
        policy_token_count=state.policy_tokens,
        last_failure=state.last_failure,
        length_quartiles=lengths.quartiles(state.accepted_lengths, state.dropped_lengths),
    )
    oldest = next(iter(state.leases.values()), None)
    if oldest is not None:
        answer.oldest_lease_age.CopyFrom(times.duration(now - oldest.at))
    return answer


def outcome_counts(groups: Groups) -> dict[str, int]:
    """Episodes that ended, by Outcome name."""
    names = {int(value): name for name, value in trajectory_pb2.Outcome.items()}
    return {names.get(outcome, str(outcome)): count for outcome, count in dict(groups.state.outcomes).items()}


def validation_results(groups: Groups, validation_id: str) -> sample_buffer_pb2.WaitValidationResponse:
    """What is measured so far. Raises UnknownValidation."""
    validation = groups.validation(validation_id)
    results = [_domain_result(groups.spec.domains[domain].name, sums) for domain, sums in validation.sums.items()]
    return sample_buffer_pb2.WaitValidationResponse(finished=validation.finished, results=results)


def _domain_result(domain: str, sums: Sums) -> sample_buffer_pb2.DomainResult:
    return sample_buffer_pb2.DomainResult(
        domain=domain,
        episode_count=sums.scored,
        failed_count=sums.failed,
        mean_reward=sums.reward / sums.scored if sums.scored else 0.0,
        mean_metrics={name: total / sums.metric_counts[name] for name, total in sums.metrics.items()},
    )


def list_trajectories(
    groups: Groups, request: sample_buffer_pb2.ListTrajectoriesRequest, payload: Payload
) -> sample_buffer_pb2.ListTrajectoriesResponse:
    """One page, newest first. The page token is the sequence number of the last trajectory shown."""
    size = min(request.page_size or DEFAULT_PAGE, LARGEST_PAGE)
    if size < 1:
        raise InvalidArgument(f"page_size is {size}; it is at least 0.", page_size=size)
    answer = sample_buffer_pb2.ListTrajectoriesResponse()
    size_bytes = 0
    for sequence, stored in _retained(groups, request, payload):
        if len(answer.trajectories) == size or size_bytes > PAGE_BYTES:
            answer.next_page_token = str(sequence + 1)
            break
        trajectory = trajectory_pb2.Trajectory.FromString(stored)
        if not request.HasField("policy_version") or _has_version(trajectory, request.policy_version):
            answer.trajectories.append(trajectory)
            size_bytes += len(stored)
    return answer


def _retained(
    groups: Groups, request: sample_buffer_pb2.ListTrajectoriesRequest, payload: Payload
) -> Iterator[tuple[int, bytes]]:
    state = groups.state
    before = _sequence(request.page_token, state.finished_count)
    for sequence, index, number in reversed(state.finished.values()):
        member = state.groups[index].members[number]
        if sequence >= before or (request.outcome and member.outcome != request.outcome):
            continue
        if not request.group_id or request.group_id == tasks.group_id(state.run_id, index):
            yield sequence, payload(member.lease_id)


def _sequence(page_token: str, newest: int) -> int:
    if not page_token:
        return newest
    if not page_token.isdecimal():
        raise InvalidArgument(f"page_token {page_token!r} is not one that was given out.", page_token=page_token)
    return int(page_token)


def _has_version(trajectory: trajectory_pb2.Trajectory, version: int) -> bool:
    return any(span.policy_version == version for turn in trajectory.turns for span in turn.version_spans)


def lineage(groups: Groups, trajectory_id: str, payload: Payload) -> sample_buffer_pb2.GetLineageResponse:
    """Everything that happened to a retained trajectory's episode and group."""
    _, index, number = groups.state.finished[trajectory_id]
    group = groups.state.groups[index]
    answer = sample_buffer_pb2.GetLineageResponse(
        trajectory=trajectory_pb2.Trajectory.FromString(payload(group.members[number].lease_id)),
        transitions=[_transition(groups, group, note) for note in group.history if note.member in (-1, number)],
    )
    engines = dict.fromkeys(turn.engine_id for turn in answer.trajectory.turns if turn.engine_id)
    for transition in answer.transitions:
        if transition.event == "completed":
            transition.engine_ids.extend(engines)
    return answer


def _transition(groups: Groups, group: Group, note: Note) -> sample_buffer_pb2.Transition:
    transition = sample_buffer_pb2.Transition(
        create_time=times.timestamp(note.at),
        event=note.event,
        lease_id=note.lease_id,
        worker_id=note.worker_id,
        policy_version=note.version,
        detail=note.detail,
    )
    if note.event in ("taken", "published", "committed"):
        transition.step = group.step
        transition.batch_id = groups.fold.batch_id(group.step)
    return transition
