"""For authors of environments: write a class, call `serve`, and any farm can play it.

    class Coin(Environment):
        "Call heads or tails."

        def reset(self, seed: int, index: int) -> str:
            self.side = random.Random(seed).choice(["heads", "tails"])
            return "heads or tails"

        def step(self, action: str) -> Step:
            return Step("", reward=float(action.strip() == self.side), done=True)

    if __name__ == "__main__":
        serve(Coin)

An object of the class plays one episode. Keyword parameters of the constructor are the settings that a domain may give.
Equal seed and settings must give an equal episode. Methods may be async; those that are not run in a thread of the
episode's own, so a slow one disturbs nobody.
"""

import argparse
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

if TYPE_CHECKING:
    from rollfarm.reward import Turn


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the policy called."""

    tool_call_id: str
    """Names the call within the action."""

    name: str
    """The tool."""

    arguments: Mapping[str, Any]
    """By name, as the policy gave them; nothing has checked them against the tool's schema."""


class Action(str):
    """What the policy wrote: a string that also knows the tools that it called.

    Where the environment shows tools, calls and thoughts are left out of the string.
    """

    __slots__ = ("tool_calls", "tool_problem")

    tool_calls: Sequence[ToolCall]
    """In the order of the text; empty unless the environment shows tools."""

    tool_problem: str
    """Why what looks like a tool call could not be read; empty where nothing is wrong."""

    def __new__(cls, text: str = "", tool_calls: Sequence[ToolCall] = (), tool_problem: str = "") -> "Action":
        action = super().__new__(cls, text)
        action.tool_calls, action.tool_problem = tool_calls, tool_problem
        return action


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool call gave."""

    tool_call_id: str
    """The call."""

    name: str
    """The tool."""

    text: str
    """What the policy sees of it."""


MediaType = Literal["image/png", "image/jpeg"]


@dataclass(frozen=True, slots=True)
class Image:
    """What the policy sees, where the model takes images."""

    data: bytes
    """A PNG or a JPEG, in colour or grey, not transparent and not turned by EXIF; at most 8 MiB."""

    media_type: MediaType = "image/png"


@dataclass(frozen=True, slots=True)
class Observation:
    """The first thing that the policy sees."""

    text: str
    """What the environment shows."""

    reference: str = ""
    """The right answer, for rewards that compare; never shown to the policy."""

    state_hash: str = ""
    """Identifies the state; empty where unknown."""

    system: str = ""
    """Instructions before everything else; empty is none."""

    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that the policy may call, as OpenAI's chat completions describe them."""

    images: Sequence[Image] = ()
    """Shown before the text."""


@dataclass(frozen=True, slots=True)
class Step:
    """The answer to an action."""

    text: str = ""
    """What the policy sees next; may be empty when done."""

    reward: float = 0.0
    """What the action earned."""

    done: bool = False
    """Whether the episode is over by the environment's own rules."""

    truncated: bool = False
    """Whether a limit of the environment cut it short."""

    state_hash: str = ""
    """Identifies the new state; empty where unknown."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Measures of the episode so far, by name, for example "success"."""

    tool_results: Sequence[ToolResult] = ()
    """What the action's tool calls gave, shown before the text."""

    images: Sequence[Image] = ()
    """Shown before the text, and after what tool calls gave."""


class Environment(ABC):
    """One episode of a world. See the module for how to write one."""

    name: ClassVar[str] = ""
    """What tasks call it; empty is the class's name in snake_case."""

    max_turns: ClassVar[int] = 0
    """Most turns of an episode; 0 is without a limit of its own."""

    runs: ClassVar[Literal["loop", "thread", "process"]] = "thread"
    """Where methods that are not async run: on the event loop itself, when each returns within microseconds; in a
    thread of the episode's own; or in a process that env_manager starts, when they hold the interpreter for long or
    may take their process down."""

    @abstractmethod
    def reset(self, seed: int, index: int) -> Observation | str | Awaitable[Observation | str]:
        """Start the episode of the task at `index` of its domain; everything random comes from `seed`."""

    @abstractmethod
    def step(self, action: Action) -> Step | Awaitable[Step]:
        """Answer what the policy wrote."""

    def score(self, turns: "Sequence[Turn]", answer: str) -> Step | Awaitable[Step]:
        """Judge an episode that an agent played by itself: its conversation with the policy, and what it printed.

        Of the Step, the reward and the metrics count, and the text says why. As it is, the answer is the only step.
        """
        return self.step(Action(answer))

    def close(self) -> Awaitable[None] | None:
        """Let go of resources. Called once, also when the episode ends early. One that hangs is not waited for."""
        return None


Kind = type[Environment]

MAX_SESSIONS = 10_000
"""Episodes that a server or a worker holds, unless it is told otherwise."""


def name_of(kind: Kind) -> str:
    """What tasks call the environment."""
    return kind.name or re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def serve(*kinds: Kind, argv: Sequence[str] | None = None) -> NoReturn:
    """Serve the environments until SIGTERM, as the command line says; with --attach, dial in to env_manager instead."""
    parser = argparse.ArgumentParser(description="Serves to env_manager: " + ", ".join(map(name_of, kinds)))
    parser.add_argument("--host", default="127.0.0.1", help="interface; 0.0.0.0 is all of them (default: %(default)s)")
    parser.add_argument("--port", type=int, default=7730, help="0 lets the system choose (default: %(default)s)")
    parser.add_argument(
        "--max-sessions",
        type=int,
        default=MAX_SESSIONS,
        help="episodes held; beyond it the longest idle is closed (default: %(default)s)",
    )
    parser.add_argument("--attach", metavar="HOST:PORT", help="dial in to the env_manager there, and serve no port")
    parser.add_argument("--token", default="", help="where the token for --attach lies: env:NAME or file:PATH")
    options = parser.parse_args(argv)
    if options.attach:
        attach(kinds, options.attach, token=_read_token(parser, options.token), max_sessions=options.max_sessions)
    # Here, because whoever only writes an environment shall not wait for gRPC.
    from rollfarm import service
    from rollfarm.config import Listen, Telemetry
    from rollfarm.env_server import SERVICE, EnvironmentServicer
    from rollfarm.telemetry import configure_logging

    configure_logging("environment", Telemetry())
    server = EnvironmentServicer(kinds, max_sessions=options.max_sessions)
    listen = Listen(host=options.host, port=options.port)

    async def main() -> None:
        await service.serve(server.register, listen, services=[SERVICE], drains=[server.drain])
        await server.close()

    service.run(main)


def attach(
    kinds: Kind | Sequence[Kind], address: str, *, token: str = "", max_sessions: int = MAX_SESSIONS
) -> NoReturn:
    """Dial in to the env_manager at host:port and play for it until SIGTERM. It dials again when the stream breaks.

    `token` is what env_manager.attach_token names; env_manager lets workers on its own machine in without, if it has
    none. A wrong one ends the process with status 2.
    """
    from rollfarm import env_attach, service
    from rollfarm.config import Telemetry, exit_bad_config
    from rollfarm.errors import InvalidArgument, WrongToken
    from rollfarm.telemetry import configure_logging

    configure_logging("environment", Telemetry())
    played = [kinds] if isinstance(kinds, type) else kinds

    async def main() -> None:
        stop = service.stop_on_signal()
        await env_attach.attach(played, address, stop, token=token, max_sessions=max_sessions)

    try:
        service.run(main)
    except (WrongToken, InvalidArgument) as error:
        exit_bad_config(f"attach to {address}", error)


def _read_token(parser: argparse.ArgumentParser, source: str) -> str:
    from rollfarm.config import ConfigError
    from rollfarm.secret import SOURCE, read_secret

    if not source:
        return ""
    try:
        if not SOURCE.fullmatch(source):
            raise ConfigError("--token: a token is not shown to everyone. Write env:NAME or file:PATH, where it lies.")
        return read_secret("--token", source)
    except ConfigError as error:
        parser.error(str(error))
