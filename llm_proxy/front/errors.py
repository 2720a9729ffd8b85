"""What an agent is told when it is refused: the same mistake in OpenAI's words or in Anthropic's."""

from dataclasses import dataclass
from typing import Any, Literal

from google.rpc import code_pb2

from rollfarm.errors import FarmError

Api = Literal["openai", "anthropic"]

STATUS: dict[int, int] = {
    code_pb2.INVALID_ARGUMENT: 400,
    code_pb2.NOT_FOUND: 404,
    code_pb2.FAILED_PRECONDITION: 409,
    code_pb2.RESOURCE_EXHAUSTED: 429,
    code_pb2.UNAVAILABLE: 503,
    code_pb2.DEADLINE_EXCEEDED: 504,
}
"""What each kind of FarmError is over HTTP; others are the farm's own fault, 500."""

OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

FIELDS = ("field", "temperature", "top_p", "top_k", "max_tokens", "top_logprobs")
"""Facts of a FarmError that name the request's field, or are named like it."""


@dataclass(eq=False)
class Refusal(Exception):
    """A request that HTTP alone can be asked."""

    status: int
    problem: str
    field: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        return self.problem


def refusal(error: Exception) -> Refusal:
    """What an agent is told of the error; of a bug, nothing that it could learn from."""
    if isinstance(error, Refusal):
        return error
    if not isinstance(error, FarmError):
        return Refusal(500, "The server failed; its log says why.")
    status = STATUS.get(error.code, 500)
    if "context_token_count" in error.facts:
        return Refusal(status, str(error), "messages", "context_length_exceeded")
    name = next((name for name in FIELDS if name in error.facts), None)
    field = error.facts["field"] if name == "field" else name
    return Refusal(status, str(error), field, error.reason.lower())


def body(api: Api, error: Refusal, *, request_id: str = "") -> dict[str, Any]:
    """The error as the API says it."""
    if api == "anthropic":
        kind = ANTHROPIC_TYPES.get(error.status, "api_error")
        where = f"{error.field}: " if error.field else ""
        return {"type": "error", "error": {"type": kind, "message": where + error.problem}, "request_id": request_id}
    kind = OPENAI_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": error.problem, "type": kind, "param": error.field, "code": error.code}}
