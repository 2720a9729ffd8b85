"""The built-in rewards: a literal dict from name to function."""

from reward_gateway.rewards.environment import environment
from reward_gateway.rewards.exact import exact
from reward_gateway.rewards.maths import maths
from rollfarm.reward import Reward

REWARDS: dict[str, Reward] = {"environment": environment, "exact": exact, "maths": maths}

INSTANT = frozenset({"environment", "exact"})
"""Those that return within microseconds and may run on the event loop. Other functions that are not async run in
worker processes."""
