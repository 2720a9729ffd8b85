"""Which versions are served, and which engines a request's demand leaves it.

Outside of a roll one version is served. In a roll, from its first engine that changed to its last, two are: the newest,
and the one that the roll began with. Invariant: both only grow, so a request that may go anywhere may always.
"""

from dataclasses import dataclass
from enum import IntEnum, auto

from llm_proxy.requests import OpenRequest
from rollfarm.errors import VersionNotServed, VersionUnavailable
from rollfarm.v1 import llm_proxy_pb2


class Lane(IntEnum):
    """Which engines a waiting request may go to."""

    ANY = auto()
    """All that serve."""

    NEWEST = auto()
    """Those that serve the newest version."""

    OLDEST = auto()
    """Those that the roll has yet to change."""

    LATER = auto()
    """None yet: it waits for a version."""


@dataclass(frozen=True, slots=True)
class Served:
    """The versions that engines may serve."""

    newest: int = 0
    oldest: int = 0
    """Less than `newest` in a roll alone."""

    def allows(self, version: int) -> bool:
        """Whether an engine of this version serves."""
        return version in (self.newest, self.oldest)

    def lanes(self, version: int) -> tuple[Lane, ...]:
        """Whom an engine of this version may take."""
        return (Lane.ANY, Lane.NEWEST) if version == self.newest else (Lane.ANY, Lane.OLDEST)

    def lane(self, request: OpenRequest) -> Lane | None:
        """Where the request waits; None when its exact version is gone.

        A request that has tokens never goes back to an older version than theirs, while a newer one is served.
        """
        asked = request.asked
        if asked.HasField("exact_version"):
            return self._exact_lane(asked.exact_version)
        needed = asked.min_version
        if needed > self.newest:
            return Lane.LATER
        return Lane.ANY if needed <= self.oldest and request.latest_version <= self.oldest else Lane.NEWEST

    def is_gone(self, asked: llm_proxy_pb2.ProxiedGeneration) -> bool:
        """Whether its exact version has passed."""
        return asked.HasField("exact_version") and self._exact_lane(asked.exact_version) is None

    def gone(self, asked: llm_proxy_pb2.ProxiedGeneration) -> VersionUnavailable:
        """The error of one whose exact version has passed."""
        return VersionUnavailable(
            f"Version {asked.exact_version} is gone; {self.newest} is served.",
            exact_version=asked.exact_version,
            policy_version=self.newest,
        )

    def not_served(self, asked: llm_proxy_pb2.ProxiedGeneration) -> VersionNotServed:
        """The error of one that waited too long for its version."""
        wanted = asked.exact_version if asked.HasField("exact_version") else asked.min_version
        return VersionNotServed(
            f"Version {wanted} did not come in time; {self.newest} is served.",
            version=wanted,
            policy_version=self.newest,
        )

    def _exact_lane(self, version: int) -> Lane | None:
        if version > self.newest:
            return Lane.LATER
        if version == self.newest:
            return Lane.NEWEST
        return Lane.OLDEST if version == self.oldest else None
