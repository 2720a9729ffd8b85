"""Prometheus metrics of reward_gateway, read from the domains when the page is asked for: nothing is counted twice.

Sum the counters and the episodes over gateways; take the largest timeout.
"""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reward_gateway.domains import Domain

PREFIX = "rollfarm_reward_gateway_"


class DomainsCollector(Collector):
    """The domains as metrics. Runs in the page's thread: it only reads."""

    def __init__(self, domains: Iterable[Domain]) -> None:
        self._domains = list(domains)

    def collect(self) -> Iterator[Metric]:
        episodes = GaugeMetricFamily(PREFIX + "episodes", "Episodes by state.", labels=["domain", "state"])
        timeouts = GaugeMetricFamily(
            PREFIX + "timeout_seconds", "How long a reward may take now.", labels=["domain", "reward"]
        )
        scores = CounterMetricFamily(
            PREFIX + "scores", "Values asked of each reward, by result.", labels=["domain", "reward", "result"]
        )
        for domain in self._domains:
            episodes.add_metric([domain.name, "running"], domain.bulkhead.places.running)
            episodes.add_metric([domain.name, "waiting"], domain.bulkhead.places.waiting)
            for asker in domain.askers:
                labels = [domain.name, asker.share.name]
                timeouts.add_metric(labels, asker.timeout.seconds())
                scores.add_metric([*labels, "scored"], asker.tally.scored)
                scores.add_metric([*labels, "cached"], asker.tally.cached)
                scores.add_metric([*labels, "failed"], asker.tally.failed)
        yield from (episodes, timeouts, scores)
