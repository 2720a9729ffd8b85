"""Which free engine a request goes to: the one with least to do, unless another has the prompt cached.

The load is counted in tokens to decode; a prompt token that has to be computed counts as a part of one. A session stays
with its engine within a bound. A first turn goes where its prompt, or the beginning of it, was seen last, if what that
saves outweighs what the engine has to do more: siblings of a group share a prompt, and still spread.
"""

from collections import OrderedDict
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
    """The latest of what was seen."""

    def __init__(self, size: int) -> None:
        self._size = size
        # A dict finds its oldest key behind all that were deleted before it, which takes longer and longer.
        self._seen: OrderedDict[Key, Seen] = OrderedDict()
        self.get = self._seen.get

    def put(self, key: Key, seen: Seen) -> None:
        self._seen[key] = seen
        self._seen.move_to_end(key)
        if len(self._seen) > self._size:
            self._seen.popitem(last=False)

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
        engine = _find(engine_id, engines)
        if engine is None or engine.load - best.load > self._settings.affinity_bound_tokens:
            return best, self._cost(length)
        return engine, self._cost(max(0, length - cached))

    def _first(self, prompt: bytes, best: EngineState, engines: Collection[EngineState], length: int) -> Chosen:
        """Where the prompt was seen last, or its beginning, while that saves more than it delays."""
        chosen, known = best, 0
        keys = [(hash(prompt), token_count(prompt))]
        if (size := self._settings.prefix_tokens) and len(prompt) > 4 * size:
            keys.append((hash(prompt[: 4 * size]), size))
        for key, cached in keys:
            seen = self.prompts.get(key)
            engine = None if seen is None else _find(seen[0], engines)
            if engine is None:
                continue
            if engine.load - best.load <= min(self._cost(cached), self._settings.affinity_bound_tokens):
                chosen, known = engine, cached
                break
        for key, cached in keys:
            self.prompts.put(key, (chosen.engine_id, cached))
        return chosen, self._cost(length - known)

    def _cost(self, prompt_tokens: int) -> int:
        return round(self._settings.prefill_token_share * prompt_tokens)


def _find(engine_id: str, engines: Collection[EngineState]) -> EngineState | None:
    for engine in engines:
        if engine.engine_id == engine_id:
            return engine
    return None
