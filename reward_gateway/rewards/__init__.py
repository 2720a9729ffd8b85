"""The built-in rewards: a literal dict from name to function."""

from reward_gateway.rewards.choice import choice
from reward_gateway.rewards.code import code
from reward_gateway.rewards.environment import environment
from reward_gateway.rewards.exact import exact
from reward_gateway.rewards.instructions import instructions
from reward_gateway.rewards.json_schema import json_schema
from reward_gateway.rewards.judge import judge, judge_pairs, judge_reference
from reward_gateway.rewards.length import overlong, relative_length
from reward_gateway.rewards.maths import maths
from reward_gateway.rewards.qa import qa
from reward_gateway.rewards.rank import rank
from reward_gateway.rewards.reasoning import reasoning_gym
from reward_gateway.rewards.regex import regex
from reward_gateway.rewards.tags import tags
from rollfarm.reward import Reward

REWARDS: dict[str, Reward] = {
    "choice": choice,
    "code": code,
    "environment": environment,
    "exact": exact,
    "instructions": instructions,
    "json_schema": json_schema,
    "judge": judge,
    "judge_pairs": judge_pairs,
    "judge_reference": judge_reference,
    "maths": maths,
    "overlong": overlong,
    "qa": qa,
    "rank": rank,
    "reasoning_gym": reasoning_gym,
    "regex": regex,
    "relative_length": relative_length,
    "tags": tags,
}

INSTANT = frozenset({"choice", "environment", "exact", "overlong", "qa", "rank", "relative_length", "tags"})
"""Those that take time linear in the episode, microseconds for most, and may run on the event loop. Other functions
that are not async run in worker processes."""

RUN_PROGRAMS = frozenset({"code"})
"""Those that run what the policy wrote, in the sandbox. They bound its time themselves, so that a program which hangs
is 0 and no failure, and are always given the longest time."""

PACKAGES: dict[str, dict[str, str]] = {
    "instructions": {"langdetect": "pip install 'rollfarm[reward]'"},
    "json_schema": {"jsonschema": "pip install 'rollfarm[reward]'"},
    "judge": {"openai": "pip install 'rollfarm[openai]'"},
    "judge_pairs": {"openai": "pip install 'rollfarm[openai]'"},
    "judge_reference": {"openai": "pip install 'rollfarm[openai]'"},
    "maths": {"math_verify": "pip install 'rollfarm[reward]'"},
    "reasoning_gym": {"reasoning_gym": "pip install 'reasoning-gym'"},
}
"""What each imports when it is called, and how that is installed. Workers import it when they start."""
