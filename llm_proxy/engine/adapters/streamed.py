"""The versions of the tokens that an inference server sends before it says which they are.

It says so at the end of a request alone, for the whole output. What it sends before the next load of weights begins was
sampled by those that were there when the request began, and goes on at once; what comes later is held back until the
end tells. So no token is ever handed over under a version that it is not of.
"""

from llm_proxy.engine.requests import Chunk
from rollfarm.errors import EngineFailed, GenerationFailed

Spans = list[tuple[int, int]]


class Streamed:
    """One request's chunks, on their way from the server."""

    def __init__(self, key: str, *, title: str, version: int) -> None:
        self._title = title
        self._version = version
        """Served when the request began."""

        self._held = Chunk(key)
        self._sent = 0
        """Tokens handed over, all of that version."""

        self.is_over = False
        """Whether the last chunk was handed over."""

    def take(self, said: Chunk, *, unchanged: bool) -> Chunk | None:
        """What can be handed over now that the server said this. `unchanged` is whether the weights are those of the
        beginning. Raises EngineFailed and GenerationFailed."""
        held = self._held
        held.token_ids += said.token_ids
        held.logprobs += said.logprobs
        held.top += said.top
        if self.is_over:
            raise EngineFailed(f"{self._title} goes on after the end of its answer.")
        if said.finish is not None:
            held.finish, held.spans = said.finish, self._after_sent(said.spans)
            self.is_over = True
        elif unchanged and held.token_ids:
            held.spans = [(self._version, len(held.token_ids))]
        else:
            return None
        self._sent += len(held.token_ids)
        self._held = Chunk(held.key)
        return held

    def end(self) -> None:
        """The server says no more. Raises EngineFailed where it has not said why."""
        if not self.is_over:
            raise EngineFailed(f"{self._title} ends its answer without saying why.")

    def _after_sent(self, spans: Spans) -> Spans:
        """Of the whole output's spans, what belongs to the tokens that are held."""
        tokens, versions = self._sent + len(self._held.token_ids), sum(count for _, count in spans)
        if tokens != versions or any(count < 0 for _, count in spans):
            raise EngineFailed(f"{self._title} answers with {tokens} tokens and the versions of {versions}.")
        rest: Spans = []
        sent = self._sent
        for version, count in spans:
            if sent and count and version != self._version:
                raise GenerationFailed(
                    f"{self._title} says that a token is of version {version} which was sent as one of {self._version}."
                )
            passed = min(sent, count)
            sent -= passed
            if count > passed:
                rest.append((version, count - passed))
        return rest
