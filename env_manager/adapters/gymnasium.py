"""Gymnasium's worlds, where what is observed and what is done can be told in words and numbers.

Observations are discrete, text, or up to 64 numbers, and tuples and dicts of such; actions are discrete or text, or
several discrete ones. The toy-text worlds are told in words of their own, and their actions have names.

Equal seeds give equal episodes where the world draws from its own generator, as Gymnasium asks. A world that draws
when it is made, before it has a seed, cannot: FrozenLake with `map_name` none, for one.
"""

import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from env_manager.adapters.adapter import SEEDS, Adapter, wrong_setting
from env_manager.adapters.toy_text import TOYS, Toy
from rollfarm.env import Observation, Step

MOST_NUMBERS = 64
"""An observation of more is no text."""


class Gymnasium(Adapter):
    """One world by its id. It runs in a thread: toy-text and classic control answer within a millisecond."""

    name = "gymnasium"
    package = "gymnasium"

    def __init__(
        self,
        *,
        id: str,
        options: dict[str, Any] = {},  # noqa: B006
        actions: list[str] = [],  # noqa: B006
        turns: Annotated[int, Field(ge=0)] = 0,
        mistakes: Annotated[int, Field(ge=0)] = 3,
        mistake_reward: float = 0.0,
    ) -> None:
        """`options` go to gymnasium.make. `actions` name the discrete actions, from the first on. 0 `turns` leaves the
        limit to the world. An action that cannot be read leaves the world as it is, pays `mistake_reward`, and is told
        what is allowed; after `mistakes` in a row, one more cuts the episode short."""
        self._id, self._options, self._names = id, options, actions
        self._turns, self._mistakes, self._mistake_reward = turns, mistakes, mistake_reward
        self._mistakes_made = 0
        self._world: Any = None
        self._toy: Toy | None = None

    def reset(self, seed: int, index: int) -> Observation:
        gymnasium = self.load()
        self._spaces = gymnasium.spaces
        try:
            self._world = gymnasium.make(self._id, max_episode_steps=self._turns or None, **self._options)
        except (gymnasium.error.Error, TypeError, ValueError) as error:
            raise wrong_setting(type(self), f"gymnasium.make({self._id!r}) failed: {error}") from None
        self._toy = TOYS.get(re.sub(r"-v\d+$", "", self._id))
        self._names = self._name_actions()
        observation, _ = self._world.reset(seed=seed % SEEDS)
        text = self._tell(observation)
        task = f"{self._toy.task}\n" if self._toy else ""
        return Observation(f"{task}{text}\n{self._allowed()}", state_hash=_hash(text))

    def step(self, action: str) -> Step:
        taken = self._read(action)
        if taken is None:
            self._mistakes_made += 1
            over = self._mistakes_made > self._mistakes
            return Step(self._allowed(), reward=self._mistake_reward, done=over, truncated=over)
        self._mistakes_made = 0
        observation, reward, terminated, truncated, _ = self._world.step(taken)
        text = self._tell(observation)
        return Step(
            text,
            reward=float(reward),
            done=bool(terminated or truncated),
            truncated=bool(truncated and not terminated),
            state_hash=_hash(text),
        )

    def close(self) -> None:
        if self._world is not None:
            self._world.close()

    def _name_actions(self) -> list[str]:
        """The names of the discrete actions, in order. Raises InvalidArgument where they do not fit the world."""
        space = self._world.action_space
        if not isinstance(space, self._spaces.Discrete):
            if not isinstance(space, (self._spaces.MultiDiscrete, self._spaces.MultiBinary, self._spaces.Text)):
                raise wrong_setting(type(self), f"the actions of {self._id} are {space}, neither discrete nor text")
            if self._names:
                raise wrong_setting(type(self), f"{self._id} takes {space}, whose actions have no names")
            return []
        names = self._names or (list(self._toy.actions) if self._toy else [])
        if names and len(names) != space.n:
            raise wrong_setting(type(self), f"{self._id} has {space.n} actions, and {len(names)} are named")
        return names or [str(space.start + number) for number in range(int(space.n))]

    def _allowed(self) -> str:
        space = self._world.action_space
        if self._names:
            return f"Answer with one of: {', '.join(self._names)}."
        if isinstance(space, self._spaces.Text):
            return f"Answer with {space.min_length} to {space.max_length} characters."
        return f"Answer with numbers from 0, one each below {_flat(getattr(space, 'nvec', [2] * space.shape[0]))}."

    def _read(self, action: str) -> Any:
        """The action that the text names, alone or among other words; None where there is none, or more than one."""
        space = self._world.action_space
        if isinstance(space, self._spaces.Text):
            return action if space.contains(action) else None
        if self._names:
            chosen = _named(action, self._names)
            return None if chosen is None else space.start + chosen
        numbers = re.findall(r"-?\d{1,9}", action)
        if len(numbers) != space.shape[0]:
            return None
        said = self._numpy.array(numbers, dtype="int64")
        taken = said.astype(space.dtype)
        return taken if (taken == said).all() and space.contains(taken) else None

    @property
    def _numpy(self) -> Any:
        return self.load("numpy")

    def _tell(self, observation: Any) -> str:
        if self._toy is not None:
            return self._toy.tell(self._world.unwrapped, observation)
        return self._say(observation)

    def _say(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, Mapping):
            return "\n".join(f"{name}: {self._say(part)}" for name, part in value.items())
        if isinstance(value, tuple):
            return ", ".join(map(self._say, value))
        numbers = self._numpy.asarray(value).ravel()
        if numbers.size > MOST_NUMBERS:
            raise wrong_setting(type(self), f"{self._id} shows {numbers.size} numbers at once, which is no text")
        return _flat(numbers.tolist())


def _named(action: str, names: Sequence[str]) -> int | None:
    """Which of `names` the text holds as a word of its own, in either case, where it is just one."""
    said = action.strip().casefold()
    exact = [number for number, name in enumerate(names) if name.casefold() == said]
    held = exact or [
        number for number, name in enumerate(names) if re.search(rf"(?<!\w){re.escape(name.casefold())}(?!\w)", said)
    ]
    return held[0] if len(held) == 1 else None


def _flat(numbers: Sequence[float]) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def _hash(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"
