"""Which free engine a request goes to: the one with least to do, unless another has the prompt cached.

The load is counted in tokens to decode; a prompt token that has to be computed counts as a part of one. A session stays
with its engine within a bound. A first turn goes where its prompt, or the beginning of it, was seen last, if what that
saves outweighs what the engine has to do more: siblings of a group share a prompt, and still spread.
"""

from collections.abc import Collection
from operator import attrgetter
from typing import NamedTuple

from llm_proxy.pool import EngineState
from llm_proxy.requests import OpenRequest
from llm_proxy.settings import RoutingSettings
from rollfarm.tokens import token_count

Key = str | int

_LOAD = attrgetter("load")


class Chosen(NamedTuple):
    """An engine for a request."""

    engine: EngineState
    prompt_cost: int
    """What its prompt costs there, in tokens to decode."""


class Seen(NamedTuple):
    """Who saw a session or a prompt last."""

    engine_id: str
    token_count: int
    """Tokens that it has cached of it, if it still has."""


class Memory:
    """The latest of what was seen."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._seen: dict[Key, Seen] = {}

    def get(self, key: Key) -> Seen | None:
        return self._seen.get(key)

    def put(self, key: Key, seen: Seen) -> None:
        self._seen.pop(key, None)
        self._seen[key] = seen
        if len(self._seen) > self._size:
            del self._seen[next(iter(self._seen))]

    @property
    def keys(self) -> list[Key]:
        """The oldest first."""
        return list(self._seen)


class Choice:
    """Chooses engines, and remembers what they were given."""

    def __init__(self, settings: RoutingSettings) -> None:
        self._settings = settings
        self.sessions = Memory(settings.session_count)
        self.prompts = Memory(settings.prefix_count)

    def choose(self, request: OpenRequest, engines: Collection[EngineState]) -> Chosen:
        """One of these engines, at least one."""
        best = min(engines, key=_LOAD)
        session, prompt = request.generation.session_id, request.generation.prompt_token_ids
        length = token_count(prompt) + request.made
        seen = self.sessions.get(session) if session else None
        chosen = self._kept(seen, best, engines, length) if seen else self._first(prompt, best, engines, length)
        if session:
            self.sessions.put(session, Seen(chosen.engine.engine_id, length))
        return chosen

    def _kept(self, seen: Seen, best: EngineState, engines: Collection[EngineState], length: int) -> Chosen:
        """A session's engine, while it has little more to do than the best."""
        engine = _find(seen.engine_id, engines)
        if engine is None or engine.load - best.load > self._settings.affinity_bound_tokens:
            return Chosen(best, self._cost(length))
        return Chosen(engine, self._cost(length - min(length, seen.token_count)))

    def _first(self, prompt: bytes, best: EngineState, engines: Collection[EngineState], length: int) -> Chosen:
        """Where the prompt was seen last, or its beginning, while that saves more than it delays."""
        chosen = Chosen(best, self._cost(length))
        keys = [(hash(prompt), token_count(prompt))]
        if (size := self._settings.prefix_tokens) and len(prompt) > 4 * size:
            keys.append((hash(prompt[: 4 * size]), size))
        for key, cached in keys:
            seen = self.prompts.get(key)
            engine = None if seen is None else _find(seen.engine_id, engines)
            if engine is None:
                continue
            if engine.load - best.load <= min(self._cost(cached), self._settings.affinity_bound_tokens):
                chosen = Chosen(engine, self._cost(length - cached))
                break
        for key, cached in keys:
            self.prompts.put(key, Seen(chosen.engine.engine_id, cached))
        return chosen

    def _cost(self, prompt_tokens: int) -> int:
        return round(self._settings.prefill_token_share * prompt_tokens)


def _find(engine_id: str, engines: Collection[EngineState]) -> EngineState | None:
    for engine in engines:
        if engine.engine_id == engine_id:
            return engine
    return None
