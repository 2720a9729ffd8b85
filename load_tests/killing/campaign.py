"""A campaign of kills: a farm behind the tap is killed as often as asked, and another one brings its run to the end."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from load_tests.killing.chaos import Chaos, Kill
from load_tests.killing.evidence import Evidence
from load_tests.killing.farm import Farm, FarmEnded
from load_tests.killing.inquiry import Inquiry
from load_tests.killing.tap import Keep, Tap, serve
from rollfarm import rpc
from rollfarm.ports import free_ports
from rollfarm.up.farm import Addresses

LAST_STEPS = 5
"""Steps that the second farm adds, so that the run ends with nothing outstanding."""

FINISH_SECONDS = 180.0
EXIT_STOPPED = 130
"""Of `rollfarm up` after Ctrl-C."""


@dataclass(frozen=True)
class Campaign:
    """Who is killed, how often, and of which farm."""

    folder: Path
    services: Sequence[str]
    kills: int
    seed: int
    """Decides which and when."""
    say: Callable[[str], None]
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the farm, over its file."""
    keep: Keep | None = None
    """Is given every whole batch."""

    async def run(self, evidence: Evidence, inquiry: Inquiry) -> tuple[list[Kill], str]:
        """Kill, then go on to the end. The kills, and why the farm did not survive, or nothing."""
        base_port = free_ports(100)
        buffer = Addresses.of(base_port, engines=1, env_managers=1).sample_buffer
        async with rpc.channel(buffer) as upstream:
            server, tap_port = await serve(Tap(upstream, evidence, self.keep))
            asking = asyncio.create_task(inquiry.go_on(buffer))
            farm = await Farm.start(self.folder, base_port, tap_port, steps=0, flags=self.flags)
            self.say(f"the farm starts in {self.folder}")
            chaos = Chaos(farm, evidence, self.services, kills=self.kills, seed=self.seed, say=self.say)
            try:
                await chaos.run()
                self.say("stopping the farm")
                if (status := await farm.stop()) != EXIT_STOPPED:
                    raise FarmEnded(f"Ctrl-C ended the farm with status {status}.\n{farm.last_words()}")
                steps = max(delivery.step for delivery in evidence.deliveries) + 1 + LAST_STEPS
                self.say(f"another farm goes on to step {steps}")
                farm = await Farm.start(self.folder, base_port, tap_port, steps, flags=self.flags)
                if status := await farm.finish(FINISH_SECONDS):
                    raise FarmEnded(f"The second farm ended with status {status}.\n{farm.last_words()}")
            except FarmEnded as failure:
                return chaos.kills, str(failure)
            finally:
                await farm.end()
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await server.stop(grace=None)
            return chaos.kills, ""
