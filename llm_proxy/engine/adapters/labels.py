"""What an inference server is told to call its weights, so that none are taken for a version that they are not."""

import secrets

from rollfarm.errors import EngineFailed


class ForeignWeights(EngineFailed):
    """A server generates with weights that this host knows nothing of."""


class Labels:
    """The names of one host's versions. They begin with a mark of its own: nobody else's name is taken for one."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._mark = secrets.token_hex(4)

    def label(self, policy_version: int) -> str:
        """What the server is to call a version."""
        return f"{self._mark}:{policy_version}"

    def version(self, label: str) -> int:
        """The version behind what the server says. Raises ForeignWeights."""
        mark, _, version = label.partition(":")
        if mark != self._mark or not version.isdecimal():
            raise ForeignWeights(
                f"{self._title} has weights that this host did not load ({label!r}): it was restarted, or another host "
                "uses it."
            )
        return int(version)
