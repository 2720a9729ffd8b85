"""kill -9 of engines under load while weights change, and an audit of every token.

    .venv/bin/python load_tests/engine_kill.py --kills 30

Four engine hosts with the simulated engine and one llm_proxy, each a process. A client keeps requests of known lengths
open on GenerateMany, some of which demand a version; the trainer's own publisher brings new weights over gloo every few
seconds. Two of the engines are killed and started again, or stopped for a while, again and again at random moments.
Every token is then compared with what the version that it claims makes at its position.

The last line on stdout is one JSON object; a table and the progress go to stderr. The exit status is 0 only if
everything went on to the end, there were kills, and each of these is 0:

  lost           requests without an answer, with too few tokens, or refused for a reason that is not true
  duplicated     answers beyond the first, and requests with too many tokens
  wrong_version  tokens that are not what the claimed version makes, or whose version was never published, goes back
                 within a request, is older than what was served when the request was made or given to the engine, or
                 was forbidden by the request
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from grpc import aio

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.engine_killing import report, tap
from load_tests.engine_killing.audit import Finding, audit
from load_tests.engine_killing.chaos import Blow, Chaos
from load_tests.engine_killing.evidence import Evidence
from load_tests.engine_killing.farm import Engine, FarmEnded, Proxy
from load_tests.engine_killing.load import Load
from load_tests.engine_killing.updates import Updates
from rollfarm import rpc
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc

ENGINES = 4
VICTIMS = 2
VOCABULARY = 152_064

ENGINE_FLAGS = {
    "engine.slots": "16",
    "engine.simulated.step_seconds": "0.01",
    "engine.simulated.vocabulary_size": str(VOCABULARY),
    "engine.weights_seconds": "15",
}
PROXY_FLAGS = {"llm_proxy.health_seconds": "0.25", "llm_proxy.health_timeout_seconds": "2"}
"""A hung engine is given up after two seconds: less, and one that imports torch on a busy machine seems to hang."""

WARM_SECONDS = 120.0
FINISH_SECONDS = 60.0


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    folder = Path(tempfile.mkdtemp(prefix="rf-engine-kill-", dir=options.folder))
    began, evidence = time.monotonic(), Evidence()
    try:
        blows, failure = asyncio.run(_run(options, folder, evidence))
    except FarmEnded as ended:
        blows, failure = [], str(ended)
    _say("auditing")
    findings: list[Finding] = audit(evidence, VOCABULARY)
    if not any(blow.kind == "kill" for blow in blows):
        failure = failure or "No engine was killed."
    result = report.figures(blows, findings, evidence, failure)
    result |= {"mode": options.mode, "rolling": options.rolling, "seed": options.seed, "cores": os.cpu_count()}
    result["wall_s"] = round(time.monotonic() - began, 1)
    print(report.table(result, findings), file=sys.stderr)
    print(json.dumps(result))
    if not findings and not failure:
        shutil.rmtree(folder)
        return 0
    _say(f"FAILED. {failure}\nThe logs are kept in {folder}")
    return 1


def _parser() -> argparse.ArgumentParser:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/engine_kill.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kills", type=int, default=20, help="how many (%(default)s)")
    add("--seconds", type=float, default=600.0, help="end after so long, however many there were (%(default)g)")
    add("--seed", type=int, default=0, help="decides which engine, when, how, and the requests (%(default)s)")
    add("--concurrency", type=int, default=96, help="requests open at once (%(default)s)")
    add("--mode", choices=("keep", "keep_cache", "resume", "drain"), default="keep", help="of updates (%(default)s)")
    add("--rolling", type=int, default=0, help="engines that change at a time; 0 is all at once (%(default)s)")
    add("--update-seconds", type=float, default=3.0, help="pause between two updates (%(default)g)")
    add("--folder", type=Path, help="where logs are kept on failure (the system's)")
    return parser


async def _run(options: argparse.Namespace, folder: Path, evidence: Evidence) -> tuple[Sequence[Blow], str]:
    """Load, update and kill; then let every request end. The blows, and why it did not go on, or nothing."""
    async with _farm(folder, evidence) as (engines, proxy), rpc.channel(proxy.address) as channel:
        stub = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        load = Load(stub, evidence, concurrency=options.concurrency, vocabulary_size=VOCABULARY, seed=options.seed)
        updates = Updates(
            stub, evidence, mode=options.mode, rolling=options.rolling, pause_seconds=options.update_seconds
        )
        chaos = Chaos(engines[:VICTIMS], evidence, kills=options.kills, seed=options.seed, say=_say)
        background: list[asyncio.Task[None]] = []
        try:
            await _serving(stub)
            background = [asyncio.create_task(load.run()), asyncio.create_task(updates.run())]
            await _warm(evidence)
            await _while_alive(chaos.run(), background, options.seconds)
            _say("letting every request end")
            await _while_alive(load.finish(FINISH_SECONDS), background, 2 * FINISH_SECONDS)
        except FarmEnded as failure:
            return chaos.blows, str(failure)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        gone = [process.ended for process in (*engines, proxy) if process.ended]
        return chaos.blows, f"A process ended by itself with:\n{gone[0]}" if gone else ""


@asynccontextmanager
async def _farm(folder: Path, evidence: Evidence) -> AsyncIterator[tuple[list[Engine], Proxy]]:
    async with AsyncExitStack() as stack:
        engines = [Engine(number, folder, ENGINE_FLAGS) for number in range(ENGINES)]
        addresses: list[str] = []
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.kill)
            server, address = await tap.serve(tap.Tap(engine.number, engine.address, evidence))
            stack.push_async_callback(server.stop, None)
            addresses.append(address)
        proxy = Proxy(folder, addresses, PROXY_FLAGS)
        await proxy.start()
        stack.push_async_callback(proxy.kill)
        yield engines, proxy


async def _serving(stub: llm_proxy_pb2_grpc.LlmProxyServiceStub) -> None:
    """Wait until every engine serves. Raises FarmEnded."""
    _say(f"{ENGINES} engines and an llm_proxy start")
    end = time.monotonic() + WARM_SECONDS
    revision: int | None = None
    while time.monotonic() < end:
        request = llm_proxy_pb2.ListEnginesRequest(after_revision=revision)
        listed = await rpc.call(stub.ListEngines, request, timeout=5.0)
        if sum(engine.state == llm_proxy_pb2.Engine.STATE_SERVING for engine in listed.engines) == ENGINES:
            return
        revision = listed.revision
    raise FarmEnded("Not every engine serves.")


async def _warm(evidence: Evidence) -> None:
    """Wait until a version is served and every engine works. Raises FarmEnded."""

    def is_warm() -> bool | None:
        working = {progress.attempt.engine for progress in evidence.progress}
        return True if evidence.committed_version and len(working) == ENGINES else None

    if await evidence.changed.first(is_warm, WARM_SECONDS) is None:
        raise FarmEnded(f"Not every engine works, or no version is served, within {WARM_SECONDS:g} s.")


async def _while_alive(work: Coroutine[Any, Any, None], background: list["asyncio.Task[None]"], seconds: float) -> None:
    """Do `work` for as long as the background goes on. Raises what it raised, and FarmEnded when it ends."""
    working = asyncio.create_task(work)
    try:
        await asyncio.wait({working, *background}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in background:
            if task.done():
                task.result()
                raise FarmEnded("llm_proxy ended the client's stream.")
        if working.done():
            working.result()
    except aio.AioRpcError as refused:
        raise FarmEnded(f"llm_proxy ended the client's stream: {refused.details()}") from None
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


def _say(text: str) -> None:
    print(f"engine_kill.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
