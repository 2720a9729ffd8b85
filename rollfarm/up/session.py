"""One session of a farm: from the first process to the report, however it ends."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollfarm.up import folder, report, summary
from rollfarm.up.claims import socket_folder
from rollfarm.up.config import FarmRoot
from rollfarm.up.console import Screen, make_console, plain_line
from rollfarm.up.farm import Plan, plan
from rollfarm.up.process import ProcessFailed
from rollfarm.up.summary import Ending, Summary
from rollfarm.up.supervisor import Supervisor
from rollfarm.up.watch import EpisodesFail, Watcher

EXIT_MISSED = 1
EXIT_INTERRUPTED = 130
REFRESH_PER_SECOND = 4


def up(farm: FarmRoot, kind: "type[Session] | None" = None, *, trainer: str = "trainer") -> int:
    """Run the farm and return the command's exit status. Raises ConfigError, PortsInUse and RunInUse before anything
    has started. `kind` of session concludes it, and `trainer` is the module in the trainer's place."""
    with socket_folder() as (sockets, sockets_claim):
        planned = plan(farm, sockets=sockets, environ=os.environ, trainer=trainer)
        folder.refuse_taken(planned.ports(), farm.up.base_port)
        with folder.opened(farm) as (resumed, run_claim):
            claims = (sockets_claim, run_claim)
            return asyncio.run((kind or Session)(farm, planned, resumed=resumed, claims=claims).run())


class Session:
    """The farm and everything that looks at it."""

    def __init__(self, farm: FarmRoot, planned: Plan, *, resumed: bool, claims: Sequence[int] = ()) -> None:
        """`claims` are descriptors that every process inherits."""
        self.farm = farm
        self._resumed = resumed
        self._began = time.monotonic()
        self._live = farm.up.console == "live" or (farm.up.console == "auto" and sys.stderr.isatty())
        self._watcher = Watcher(planned.addresses, max_failed_groups=farm.up.max_failed_groups)
        self.picture = self._watcher.picture
        """What the services said last."""
        self._supervisor = Supervisor(planned.specs, farm.up, logs=farm.run.path / "logs", say=self._say, claims=claims)
        self._screen = Screen(farm.run.name, self.picture, self._supervisor.children, self._began)

    async def run(self) -> int:
        """Until the run is over, or somebody or something ends it."""
        try:
            async with self._watcher, self._beside():
                ending = await self._until_end()
        except (ProcessFailed, EpisodesFail) as failed:
            self._explain(failed)
            if self.picture.begun:
                self.conclude(Ending.FAILED)
            return failed.status
        result = self.conclude(ending)
        if ending is Ending.INTERRUPTED:
            return EXIT_INTERRUPTED
        return EXIT_MISSED if result.missed(self.farm.up.min_gain) else 0

    async def _until_end(self) -> Ending:
        interrupted = asyncio.Event()
        running = asyncio.create_task(self._supervisor.run(self._finish))
        stopping = asyncio.create_task(interrupted.wait())
        with _signals(lambda: self._supervisor.hurry() if interrupted.is_set() else interrupted.set()):
            limit = self.farm.up.time_limit_seconds or None
            await asyncio.wait({running, stopping}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if running.done():
                running.result()
                return Ending.FINISHED
            self._say("draining; once more kills" if interrupted.is_set() else "the time is up; draining")
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        if self.picture.finished:
            return Ending.FINISHED
        return Ending.INTERRUPTED if interrupted.is_set() else Ending.TIME_LIMIT

    async def _finish(self) -> None:
        """Wait for the last step, and look once more for the final numbers."""
        await self._watcher.finished()
        await self._watcher.look()
        self._say("every step is done; draining")

    @contextlib.asynccontextmanager
    async def _beside(self) -> AsyncIterator[None]:
        """Ask the services and show the answers meanwhile."""
        tasks = [asyncio.create_task(self._watcher.watch())]
        if self.farm.up.console == "off":
            shown = contextlib.nullcontext()
        elif self._live:
            console = make_console(stderr=True)
            shown = Live(self._screen, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True)
        else:
            shown = contextlib.nullcontext()
            tasks.append(asyncio.create_task(self._show_plainly()))
        try:
            with shown:
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _show_plainly(self) -> None:
        while not self._supervisor.draining:
            await asyncio.sleep(self.farm.up.plain_seconds)
            line = plain_line(self.picture, self._supervisor.children)
            print(line, file=sys.stderr, flush=True)

    def _say(self, text: str) -> None:
        if self._live:
            self._screen.events.append(text)
        else:
            print(f"rollfarm up: {text}", file=sys.stderr, flush=True)

    def _explain(self, failed: ProcessFailed | EpisodesFail) -> None:
        print(f"rollfarm up: {failed}", file=sys.stderr)
        if isinstance(failed, ProcessFailed) and failed.tail:
            print(f"The last lines of {failed.log}:", file=sys.stderr)
            print("  " + failed.tail.replace("\n", "\n  "), file=sys.stderr)

    def conclude(self, ending: Ending) -> Summary:
        """Write what remains, and say what came of it."""
        result, run = self.summary(ending), self.farm.run.path
        summary.write(result, run)
        report.write(result, run)
        self._print(result)
        return result

    def summary(self, ending: Ending) -> Summary:
        """What came of it."""
        began = self.picture.first_steps_at or self._began
        return summary.summarise(
            self.picture,
            ending,
            metric=self.farm.up.metric,
            wall_s=time.monotonic() - self._began,
            learning_s=time.monotonic() - began,
            restarts=self._supervisor.restarts,
            resumed=self._resumed,
            run=self.farm.run.path,
        )

    def _print(self, result: Summary) -> None:
        min_gain = self.farm.up.min_gain
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        for name, value in summary.lines(result, min_gain):
            table.add_row(name, Text(value))
        console = make_console(stderr=True)
        console.print()
        console.print(table)
        if not result.finished:
            resume = folder.resume_command(self.farm.run.path)
            console.print(Text.assemble("\nNot finished. Go on with: ", (resume, "bold")), soft_wrap=True)
        elif missed := result.missed(min_gain):
            console.print(Text(f"\n{missed}", style="bold red"))
        console.print()
        print(result.line(), flush=True)


@contextlib.contextmanager
def _signals(handle: Callable[[], None]) -> Iterator[None]:
    """Call `handle` at SIGINT and SIGTERM."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
