"""`rollfarm up`, with env_manager and trainer reaching sample_buffer through a tap: `tapped ADDRESS CONFIG --flags...`.

Everything else is what `rollfarm up` does, by its own code.
"""

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rollfarm.up import folder
from rollfarm.up.claims import socket_folder
from rollfarm.up.config import load_farm
from rollfarm.up.farm import Plan, ProcessSpec, plan
from rollfarm.up.session import Session

FLAG = ".sample_buffer_address"


def tapped(planned: Plan, address: str) -> Plan:
    """The plan with `address` wherever a process is told where sample_buffer is."""
    return replace(planned, specs=tuple(replace(spec, argv=tuple(_told(spec, address))) for spec in planned.specs))


def _told(spec: ProcessSpec, address: str) -> Iterator[str]:
    before = ""
    for word in spec.argv:
        yield address if before.endswith(FLAG) else word
        before = word


def main(address: str, argv: Sequence[str]) -> int:
    folder.make_importable(folder.checkout())
    farm = load_farm(argv)
    with socket_folder() as (sockets, sockets_claim):
        planned = tapped(plan(farm, sockets=sockets, environ=os.environ), address)
        folder.refuse_taken(planned.ports(), farm.up.base_port)
        with folder.opened(farm) as (resumed, run_claim):
            return asyncio.run(Session(farm, planned, resumed=resumed, claims=(sockets_claim, run_claim)).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
