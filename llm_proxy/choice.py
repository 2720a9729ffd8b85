"""Which free engine a request goes to: the one with least to do, unless another has the prompt cached.

The load is counted in tokens to decode; a prompt token that has to be computed counts as a part of one. A session stays
with its engine within a bound. A first turn goes where its prompt, or the beginning of it, was seen last, if what that
saves outweighs what the engine has to do more: siblings of a group share a prompt, and still spread.
"""

from collections.abc import Collection
from operator import attrgetter

from llm_proxy.pool import EngineState
from llm_proxy.requests import OpenRequest
from llm_proxy.settings import RoutingSettings
from rollfarm.tokens import token_count

Key = str | int

_LOAD = attrgetter("load")


Chosen = tuple[EngineState, int]
"""An engine for a request, and what the prompt costs there, in tokens to decode."""

Seen = tuple[str, int]
"""The id of the engine that saw a session or a prompt last, and tokens that it has cached of it, if it still has."""


class Memory:
    """The latest of what was seen: `size` at least, twice as many at most.

    Two generations instead of an order: to remember is to write into a dict, to forget is to drop the older one.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._young: dict[Key, Seen] = {}
        self._old: dict[Key, Seen] = {}

    def get(self, key: Key) -> Seen | None:
        return self._young.get(key) or self._old.get(key)

    def put(self, key: Key, seen: Seen) -> None:
        if len(self._young) >= self._size and key not in self._young:
            self._young, self._old = {}, self._young
        self._young[key] = seen


class Choice:
    """Chooses engines, and remembers what they were given."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self.sessions = Memory(settings.session_count)
        self.prompts = Memory(settings.prefix_count)

    def choose(self, request: OpenRequest, engines: Collection[EngineState]) -> Chosen:
        """One of these engines, at least one."""
        best = min(engines, key=_LOAD)
        generation = request.generation
        session, prompt = generation.session_id, generation.prompt_token_ids
        length = token_count(prompt) + request.made
        seen = self.sessions.get(session) if session else None
        chosen = self._kept(seen, best, engines, length) if seen else self._first(prompt, best, engines, length)
        if session:
            self.sessions.put(session, (chosen[0].engine_id, length))
        return chosen

    def _kept(self, seen: Seen, best: EngineState, engines: Collection[EngineState], length: int) -> Chosen:
        """A session's engine, while it has little more to do than the best."""
        engine_id, cached = seen
        engine = _near(engine_id, best, engines, self._settings.affinity_bound_tokens)
        return (best, self._cost(length)) if engine is None else (engine, self._cost(max(0, length - cached)))

    def _first(self, prompt: bytes, best: EngineState, engines: Collection[EngineState], length: int) -> Chosen:
        """Where the prompt was seen last, or its beginning, while that saves more than it delays."""
        chosen, known = best, 0
        for key, cached in (keys := self._keys(prompt)):
            if (seen := self.prompts.get(key)) is None:
                continue
            worth = min(self._cost(cached), self._settings.affinity_bound_tokens)
            if (engine := _near(seen[0], best, engines, worth)) is not None:
                chosen, known = engine, cached
                break
        for key, cached in keys:
            self.prompts.put(key, (chosen.engine_id, cached))
        return chosen, self._cost(length - known)

    def _keys(self, prompt: bytes) -> list[tuple[Key, int]]:
        """What the prompt and its beginning are remembered by, with their tokens."""
        keys: list[tuple[Key, int]] = [(hash(prompt), token_count(prompt))]
        if (size := self._settings.prefix_tokens) and len(prompt) > 4 * size:
            keys.append((hash(prompt[: 4 * size]), size))
        return keys

    def _cost(self, prompt_tokens: int) -> int:
        return round(self._settings.prefill_token_share * prompt_tokens)


def _near(engine_id: str, best: EngineState, engines: Collection[EngineState], most_tokens: int) -> EngineState | None:
    """The engine, if it is among these and has no more than so many tokens more to do than the best of them."""
    if best.engine_id == engine_id:
        return best
    for engine in engines:
        if engine.engine_id == engine_id:
            return engine if engine.load - best.load <= most_tokens else None
    return None
