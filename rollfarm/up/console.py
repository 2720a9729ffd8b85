"""The picture of the farm for people: a screen that redraws itself on a terminal, and a line now and then elsewhere."""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rollfarm.up.process import Child, State
from rollfarm.up.watch import Picture
from rollfarm.v1 import llm_proxy_pb2, trainer_pb2

STATE_STYLES = {
    State.RUNNING: "green",
    State.DONE: "dim",
    State.STARTING: "yellow",
    State.RESTARTING: "bold red",
    State.FAILED: "bold red",
    State.DRAINING: "yellow",
}
PHASES: dict[int, str] = {
    trainer_pb2.PHASE_UNSPECIFIED: "starting",
    trainer_pb2.PHASE_LOADING: "loading the model",
    trainer_pb2.PHASE_WARMING_UP: "warm start",
    trainer_pb2.PHASE_VALIDATING: "validating",
    trainer_pb2.PHASE_WAITING: "waiting for a batch",
    trainer_pb2.PHASE_TRAINING: "training",
    trainer_pb2.PHASE_PUBLISHING: "publishing weights",
    trainer_pb2.PHASE_FINISHED: "finished",
}
BLOCKS = " ▁▂▃▄▅▆▇█"
EVENTS_KEPT = 5
CURVE_ROWS = 4
CURVE_WIDTH = 64
CURVE_LABELS_WIDTH = 24
NARROW = 100
"""Below this many columns the services' pids and times give way to what flows."""
PIPE_WIDTH = 160


@dataclass
class Screen:
    """Everything that the console shows. Rich asks it for a new picture a few times a second."""

    run: str
    picture: Picture
    children: Sequence[Child]
    began: float
    """Monotonic seconds."""
    events: deque[str] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        now = time.monotonic()
        services = self._services() if options.max_width < NARROW else self._services_in_full(now)
        parts: list[RenderableType] = [
            self._head(now),
            self._bar(),
            Padding(_beside(services, self._flow()), (1, 0, 0, 0)),
            Padding(self._curve(options.max_width - CURVE_LABELS_WIDTH), (1, 0, 0, 0)),
        ]
        if self.events:
            parts += [Text(), *(Text(f"  {event}", style="yellow") for event in self.events)]
        yield Padding(Group(*parts), (1, 2))

    def _head(self, now: float) -> RenderableType:
        line = Table.grid(expand=True)
        line.add_column()
        line.add_column(justify="right")
        progress = self.picture.progress
        step = f"step {progress.step_count} of {progress.total_step_count or '∞'}" if progress else ""
        left = self.picture.seconds_left()
        clock = f"{clock_text(now - self.began)} gone" + (f" · {clock_text(left)} left" if left is not None else "")
        line.add_row(
            Text.assemble(
                ("rollfarm ", "bold cyan"), (self.run, "bold"), f"  {PHASES.get(self.picture.phase, 'busy')}"
            ),
            Text.assemble((step, "bold"), f"  {clock}"),
        )
        return line

    def _bar(self) -> RenderableType:
        progress = self.picture.progress
        total = progress.total_step_count if progress else 0
        if not progress or not total:
            return Rule(style="dim")
        return ProgressBar(total=total, completed=progress.step_count, style="bright_black", complete_style="cyan")

    def _services(self) -> Table:
        table = _table("service", "state")
        for child in self.children:
            restarts = f" ×{child.restarts}" if child.restarts else ""
            table.add_row(child.name, Text.assemble(_state_text(child), (restarts, "bold red")))
        return table

    def _services_in_full(self, now: float) -> Table:
        table = _table("service", "state", "pid", "up", "restarts")
        for child in self.children:
            table.add_row(
                child.name,
                _state_text(child),
                Text(str(child.pid or "·"), style="dim"),
                Text(clock_text(now - child.since) if child.state is State.RUNNING else "·", style="dim"),
                Text(str(child.restarts or "·"), style="bold red" if child.restarts else "dim"),
            )
        return table

    def _flow(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in flow(self.picture):
            table.add_row(name, Text(value))
        return table

    def _curve(self, width: int) -> RenderableType:
        rewards = self.picture.rewards()
        if len(rewards) < 2:
            return Text("  the reward curve appears after the second step", style="dim")
        rows = chart(rewards, width=max(1, min(CURVE_WIDTH, width)), rows=CURVE_ROWS)
        low, high = min(rewards), max(rewards)
        grid = Table.grid(padding=(0, 1))
        grid.add_column(justify="right", style="dim")
        grid.add_column(style="cyan", no_wrap=True)
        grid.add_column(style="bold", no_wrap=True)
        labels = [f"{high:.2f}", *[""] * (len(rows) - 2), f"{low:.2f}"]
        for label, row in zip(labels, rows, strict=True):
            grid.add_row(label, row, f"reward {rewards[-1]:.2f}" if row is rows[0] else "")
        return grid


def phase_text(picture: Picture) -> str:
    """What the trainer does, in words."""
    return PHASES.get(picture.phase, "busy")


def flow(picture: Picture, *, rates: bool = True) -> list[tuple[str, str]]:
    """What moves through the farm, as names and values; a single look knows no `rates`."""
    rows: list[tuple[str, str]] = []
    if (buffer := picture.buffer) is not None:
        episodes = buffer.episode_counts
        rows += [
            ("policy version", f"{buffer.policy_version}{_engine_versions(picture)}"),
            ("episodes", f"{episodes['pending']} pending, {episodes['leased']} playing, {episodes['done']} done"),
            ("groups ready", str(buffer.group_counts["ready"])),
            ("credits", f"{buffer.credits_in_use_count} of {buffer.credit_count} in use"),
            ("staleness", _staleness(picture)),
            ("samples", f"{buffer.committed_trajectory_count} committed{_dropped(picture)}"),
        ]
    if (proxy := picture.proxy) is not None:
        gate = ", gate closed" if proxy.gate_closed else ""
        speed = f"{number_text(picture.tokens.per_second())}/s, " if rates else ""
        rows += [
            ("generations", f"{proxy.queued_count} queued, {proxy.running_count} running{gate}"),
            ("tokens", f"{speed}{number_text(picture.tokens.total)} so far"),
        ]
    return rows or [("", "the services are starting")]


def plain_line(picture: Picture, children: Sequence[Child]) -> str:
    """The same in one line."""
    progress, buffer, proxy = picture.progress, picture.buffer, picture.proxy
    up = sum(child.state is State.RUNNING for child in children)
    parts = [phase_text(picture), f"{up}/{sum(not child.spec.once for child in children)} up"]
    if progress is not None and progress.total_step_count:
        parts.insert(0, f"step {progress.step_count}/{progress.total_step_count}")
    if rewards := picture.rewards():
        parts.append(f"reward {rewards[-1]:.2f} {sparkline(rewards, 16)}")
    if buffer is not None:
        parts.append(f"version {buffer.policy_version}")
        parts.append(f"credits {buffer.credits_in_use_count}/{buffer.credit_count}")
        parts.append(f"max lag {buffer.max_staleness}")
    if proxy is not None:
        parts.append(f"{proxy.queued_count}+{proxy.running_count} generations")
        parts.append(f"{number_text(picture.tokens.per_second())} tok/s")
    if (left := picture.seconds_left()) is not None:
        parts.append(f"{clock_text(left)} left")
    return " · ".join(parts)


def chart(values: Sequence[float], *, width: int, rows: int) -> list[str]:
    """`values` as block characters, `rows` lines high, top line first; the lowest value is one eighth high."""
    columns = resample(values, width)
    low, high = min(columns), max(columns)
    span = high - low or 1.0
    eighths = [1 + round((value - low) / span * (8 * rows - 1)) for value in columns]
    return ["".join(BLOCKS[max(0, min(8, height - 8 * row))] for height in eighths) for row in reversed(range(rows))]


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as one line of block characters."""
    return chart(values, width=width, rows=1)[0]


def resample(values: Sequence[float], width: int) -> list[float]:
    """Means of at most `width` equal stretches of `values`."""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def clock_text(seconds: float) -> str:
    """1:05 or 2:01:05."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def number_text(value: float) -> str:
    """Short and rounded: 950, 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e4)):
        if value >= size:
            return f"{value / min(size, 1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.0f}"


def make_console(*, stderr: bool = False) -> Console:
    """A console that wraps at the terminal's edge, and far out where lines go to a file or a pipe."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right" if name in ("pid", "up", "restarts") else "left", no_wrap=True)
    return table


def _state_text(child: Child) -> Text:
    return Text(child.state, style=STATE_STYLES.get(child.state, "dim"))


def _beside(left: RenderableType, right: RenderableType) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(left, right)
    return grid


def _engine_versions(picture: Picture) -> str:
    if picture.proxy is None:
        return ""
    states = llm_proxy_pb2.Engine
    engines = picture.proxy.engines
    serving = [str(engine.policy_version) for engine in engines if engine.state == states.STATE_SERVING]
    served = f", engines serve {' '.join(serving)}" if serving else ", no engine serves"
    suspended = sum(engine.state == states.STATE_SUSPENDED for engine in engines)
    return f"{served}, {suspended} suspended" if suspended else served


def _staleness(picture: Picture) -> str:
    assert picture.buffer is not None
    counts = picture.buffer.staleness_counts
    total = sum(counts.values())
    if not total:
        return "·"
    shares = ", ".join(f"{lag}: {count / total:.0%}" for lag, count in sorted(counts.items()))
    return f"{shares}  (at most {picture.buffer.max_staleness})"


def _dropped(picture: Picture) -> str:
    assert picture.buffer is not None
    by_count = sorted(picture.buffer.dropped_group_counts.items(), key=lambda item: (-item[1], item[0]))
    if not by_count:
        return ""
    total = sum(count for _, count in by_count)
    why = ", ".join(f"{count} {reason}" for reason, count in by_count)
    return f", {total} groups dropped ({why})" if len(by_count) > 1 else f", {total} groups dropped ({by_count[0][0]})"
