"""Which inference servers the adapters were made for."""

from packaging.version import InvalidVersion, Version

from rollfarm.config import ConfigError

OLDEST = {
    "vLLM": "0.32.0",
    "SGLang": "0.5.23",
}
"""The versions that the contract suite passed with. Older ones lack routes, or are not known to have them; newer ones
are taken, and what they answer is checked."""


def check_version(title: str, found: str, *, table: str) -> None:
    """Raise ConfigError where a server's version is too old, or none."""
    oldest = OLDEST[title]
    try:
        known = Version(found) >= Version(oldest)
    except InvalidVersion:
        known = False
    if not known:
        raise ConfigError(
            f"{table}: {title} says that it is version {found}; {oldest} is the oldest that works. Install {oldest} or "
            f"a newer one, and start it anew."
        )
