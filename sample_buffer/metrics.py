"""Prometheus metrics of sample_buffer, read from the state when the page is asked for: nothing is counted twice.

Counters are the run's own and survive restarts. Sum counters over farms; the gauges describe one farm each.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollfarm.errors import UnknownRun
from sample_buffer import lengths, views
from sample_buffer.groups import Groups
from sample_buffer.runs import Runs

PREFIX = "rollfarm_sample_buffer_"


class StateCollector(Collector):
    """The current run as metrics. Runs in the page's thread: it only reads, and copies what it iterates over."""

    def __init__(self, runs: Callable[[], Runs]) -> None:
        self._runs = runs

    def collect(self) -> Iterator[Metric]:
        try:
            groups = self._runs().run("")
        except UnknownRun:
            return
        yield from _gauges(groups)
        yield from _lengths(groups)
        yield from _counters(groups)


def _gauges(groups: Groups) -> Iterator[Metric]:
    state, fold = groups.state, groups.fold
    plain = {
        "policy_version": ("Newest published version.", state.version),
        "credits": ("Groups that may be outstanding.", groups.capacity),
        "credits_in_use": ("Groups outstanding.", groups.credits_in_use),
        "leases": ("Episodes on loan.", len(state.leases)),
        "next_batch_step": ("First step that was never delivered.", state.next_batch_step),
        "next_commit_step": ("First step that is not committed.", state.next_commit_step),
        "max_staleness_versions": ("Greatest lag of a trajectory taken.", max(dict(state.staleness), default=0)),
        "last_batch_mean_reward": ("Mean reward of the last batch taken.", state.last_batch_mean_reward or 0.0),
    }
    for name, (text, value) in plain.items():
        yield GaugeMetricFamily(PREFIX + name, text, value=value)
    stages = {"open": len(fold.open), "ready": len(fold.ready), "taken": fold.taken_count}
    yield _by(GaugeMetricFamily(PREFIX + "groups", "Groups by state.", labels=["state"]), stages)
    episodes = {stage: count for stage, count in dict(fold.episodes).items() if stage in ("pending", "leased", "done")}
    yield _by(GaugeMetricFamily(PREFIX + "episodes", "Episodes by state.", labels=["state"]), episodes)


def _lengths(groups: Groups) -> Iterator[Metric]:
    """Quarters of the finished episodes, the shortest first. Gauges: what is long changes with the policy."""
    state, by_quartile = groups.state, PREFIX + "length_quartile_"
    tokens = GaugeMetricFamily(by_quartile + "tokens", "Longest finished episode.", labels=["quartile"])
    finished = GaugeMetricFamily(by_quartile + "episodes", "Finished episodes.", labels=["quartile"])
    lost = GaugeMetricFamily(by_quartile + "dropped", "Those lost with their group.", labels=["quartile", "reason"])
    dropped = {reason: dict(histogram) for reason, histogram in dict(state.dropped_lengths).items()}
    for number, quarter in enumerate(lengths.quartiles(dict(state.accepted_lengths), dropped), 1):
        tokens.add_metric([str(number)], quarter.max_token_count)
        finished.add_metric([str(number)], quarter.episode_count)
        for reason, count in quarter.dropped_counts.items():
            lost.add_metric([str(number), reason], count)
    yield from (tokens, finished, lost)


def _counters(groups: Groups) -> Iterator[Metric]:
    state = groups.state
    plain = {
        "groups_admitted": ("Groups ever admitted.", state.next_group),
        "policy_tokens": ("Policy tokens accepted.", state.policy_tokens),
        "committed_trajectories": ("Trajectories in committed steps.", state.committed_trajectories),
        "expired_leases": ("Leases whose worker fell silent.", state.expired_leases),
    }
    for name, (text, value) in plain.items():
        yield CounterMetricFamily(PREFIX + name, text, value=value)
    labelled: dict[str, tuple[str, str, Mapping[str, int]]] = {
        "groups_dropped": ("Groups dropped.", "reason", dict(state.dropped)),
        "groups_pooled": ('Complete groups that the filter "pools" saw.', "pool", dict(state.pools)),
        "episodes_ended": ("Episodes by how they ended.", "outcome", views.outcome_counts(groups)),
        "trajectories_taken": (
            "Trajectories taken for training, by versions of lag.",
            "staleness",
            {str(lag): count for lag, count in dict(state.staleness).items()},
        ),
    }
    for name, (text, label, values) in labelled.items():
        yield _by(CounterMetricFamily(PREFIX + name, text, labels=[label]), values)


def _by(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, int]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
