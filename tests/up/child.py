"""A process for the supervisor's tests; `child.py KIND ...` does one thing."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main(kind: str, *arguments: str) -> None:
    if kind == "sleep":
        time.sleep(60)
    elif kind == "exit":
        print("the reason is in the log")
        sys.exit(int(arguments[0]))
    elif kind == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(arguments[0], os.getpid())
        time.sleep(60)
    elif kind == "parent":
        grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        note(arguments[0], grandchild.pid)
        time.sleep(60)
    elif kind == "touch":
        note(arguments[0], os.getpid())
    elif kind == "drained":
        signal.signal(signal.SIGTERM, lambda *_: (note(arguments[0], arguments[1]), sys.exit(0)))
        time.sleep(60)
    elif kind == "farm":
        run_farm(Path(arguments[0]), arguments[1])
    elif kind == "serve":
        serve(int(arguments[0]))
    elif kind == "trainer":
        serve_progress(int(arguments[0]), *arguments[1:])


def run_farm(run: Path, pids: str) -> None:
    """A farm with one process, which ends by no other signal than SIGKILL."""
    from rollfarm.run import RunConfig
    from rollfarm.up import folder
    from rollfarm.up.claims import socket_folder
    from rollfarm.up.config import FarmRoot
    from rollfarm.up.farm import ProcessSpec
    from rollfarm.up.supervisor import Supervisor

    root = FarmRoot(run=RunConfig(folder=run.parent, name=run.name))
    stubborn = ProcessSpec("stubborn", (sys.executable, __file__, "stubborn", pids), stage=0)
    with socket_folder() as (_, sockets), folder.opened(root) as (_, claim):
        farm = Supervisor([stubborn], root.up, logs=run / "logs", say=print, claims=(sockets, claim))
        asyncio.run(farm.run(asyncio.Event().wait))


def serve(port: int) -> None:
    from rollfarm import service
    from rollfarm.config import Listen

    listen = Listen(port=port, drain_seconds=1)
    service.run(lambda: service.serve(lambda server: None, listen, services=[]))


def serve_progress(port: int, phase: str, then: str) -> None:
    """A trainer that did two of four steps. Asked for the second time, it may crash."""
    from rollfarm import service
    from rollfarm.config import Listen
    from rollfarm.v1 import trainer_pb2, trainer_pb2_grpc

    class Trainer(trainer_pb2_grpc.TrainerServiceServicer):
        asked = 0

        async def GetProgress(self, request, context):
            self.asked += 1
            if then == "crash" and self.asked == 2:
                os._exit(7)
            return trainer_pb2.GetProgressResponse(
                phase=trainer_pb2.Phase.Value(phase),
                step_count=2,
                total_step_count=4,
                steps=[trainer_pb2.StepMetrics(step=step, mean_reward=0.5) for step in range(2)],
                validations=[
                    trainer_pb2.Validation(step_count=2 * number, mean_reward=0.1 + number, metrics={"success": number})
                    for number in range(2)
                ],
            )

    def register(server):
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server(Trainer(), server)

    listen = Listen(port=port, drain_seconds=1)
    service.run(lambda: service.serve(register, listen, services=["rollfarm.v1.TrainerService"]))


def note(path: str, what: object) -> None:
    with Path(path).open("a") as file:
        file.write(f"{what}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
