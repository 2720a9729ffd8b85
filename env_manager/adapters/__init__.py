"""Other people's environments: a literal dict from name to where its adapter is.

No adapter is imported before it is asked for, and none imports its package before an episode needs it.
"""

from collections.abc import Mapping
from typing import Any

from rollfarm.registry import resolve

ADAPTERS: dict[str, str] = {
    "dataset": "env_manager.adapters.dataset:Dataset",
    "gem": "env_manager.adapters.gem:Gem",
    "gymnasium": "env_manager.adapters.gymnasium:Gymnasium",
    "mcp": "env_manager.adapters.mcp:Mcp",
    "openenv": "env_manager.adapters.openenv:OpenEnv",
    "reasoning_gym": "env_manager.adapters.reasoning_gym:ReasoningGym",
    "textarena": "env_manager.adapters.textarena:TextArena",
    "textworld": "env_manager.adapters.textworld:TextWorld",
    "verifiers": "env_manager.adapters.verifiers:Verifiers",
}
"""What tasks call it, and "module:Class"."""


def find(built_in: Mapping[str, Any], name: str) -> Any:
    """What is built in by this name, the adapter of this name, or what "module:name" imports.

    Raises ConfigError, which lists the known names.
    """
    if name in ADAPTERS and name not in built_in:
        name = ADAPTERS[name]
    return resolve({**ADAPTERS, **built_in}, name, what="environment")


def is_installed(name: str) -> bool:
    """Whether the adapter's package can be imported here."""
    return bool(find({}, name).is_installed())
