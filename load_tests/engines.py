"""What the front door costs a real engine, and what queue scheduling gains over batches.

    .venv/bin/python load_tests/engines.py
    .venv/bin/python load_tests/engines.py --skip vllm --steps 4

Three parts. vllm: tokens a second of a real vLLM on CPU through llm_proxy and engine host, against the same prompts
given to the very same vLLM by HTTP, at whichever concurrency suits it best, in turns. two_engines: two engines against
one. scheduling: rollout steps by the real llm_proxy over four simulated engine hosts, by batches, by a queue, and by a
queue with redundant prompts; load_tests/README.md describes the workload.

The last line on stdout is one JSON object; a table and the progress go to stderr. Ratios are of one round each, and
figures are their medians; of the steps it is their mean times that are compared.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from load_tests.engine_bench.scheduling import PROMPT_TOKENS, Samples, Step, by_batches, by_queue
from load_tests.engine_bench.servers import ROOT, VLLM_PYTHON, Server, engine, llm_proxy, make_model
from load_tests.engine_bench.throughput import Work, through_farm
from load_tests.engine_bench.workload import CUT, DISTRIBUTION, prompt
from rollfarm import rpc
from rollfarm.ports import free_port
from rollfarm.v1 import llm_proxy_pb2, llm_proxy_pb2_grpc

PARTS = ("vllm", "two_engines", "scheduling")
Figures = dict[str, object]

VLLM_SLOTS = 256
CONCURRENCIES = (64, 128, 256, 384)
"""Tried on vLLM directly; its best one is what the farm is compared with."""

SHORTEST_OUTPUT, LONGEST_OUTPUT = 64, 192
"""Lengths are uniform, so that slots are freed one by one and not all at once."""

CORES_FOR_TWO = 6
"""Fewer cannot run two vLLMs, two hosts, llm_proxy and a client side by side."""

ENGINES, SLOTS = 4, 16
"""Of the scheduling part: one batch fills every slot."""
GROUPS, GROUP_SIZE, REDUNDANT = 8, 8, 16
MEDIAN_TOKENS = 64
STEP_SECONDS = 0.005
TOKENS_OF_ONE = 16
"""A simulated token stands for so many: the median sample has 1,024."""
REAL_STEP_SECONDS, REAL_REQUEST_SECONDS = 0.008, 0.00005
"""Of one decoded token, as [engine.simulated] has them."""
TIME_SCALE = TOKENS_OF_ONE * REAL_STEP_SECONDS / STEP_SECONDS
VOCABULARY = 152_064


def main() -> None:
    options = _parse(sys.argv[1:])
    figures: Figures = {
        "benchmark": "engines",
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "rounds": options.rounds,
        "seed": options.seed,
    }
    with tempfile.TemporaryDirectory(prefix="rf-engines-") as name, _client() as client:
        folder = Path(name)
        if "vllm" not in options.skip:
            figures |= _vllm(options, folder, client)
        if "two_engines" not in options.skip:
            figures |= _two_engines(options, folder, client)
        if "scheduling" not in options.skip:
            figures |= _scheduling(options, folder)
    print("\n".join(f"{key:<26}{value}" for key, value in figures.items()), file=sys.stderr)
    print(json.dumps(figures))


def _parse(argv: list[str]) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        prog="load_tests/engines.py",
        description=f"{summary}\n{details}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="rounds of the first two parts (%(default)s)")
    add("--requests", type=int, default=640, help="requests of one measurement (%(default)s)")
    add("--steps", type=int, default=12, help="rollout steps by each way of scheduling (%(default)s)")
    add("--stream-interval", type=int, default=0, help="engine.vllm.stream_interval of the farm's part (%(default)s)")
    add("--seed", type=int, default=0, help="decides lengths and rewards (%(default)s)")
    add("--skip", action="append", choices=PARTS, default=[], help="leave a part out; may be repeated")
    return parser.parse_args(argv)


@contextmanager
def _client() -> Iterator[ProcessPoolExecutor]:
    """A process of its own for the client, so that what is measured shares its interpreter with nobody."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


# vllm.


def _vllm(options: argparse.Namespace, folder: Path, client: ProcessPoolExecutor) -> Figures:
    if not VLLM_PYTHON.is_file():
        raise SystemExit(
            f"load_tests/engines.py: {VLLM_PYTHON} is not there. Run tools/install-vllm.sh, or --skip vllm."
        )
    parameters = client.submit(make_model, folder / "model").result()
    port = free_port()
    _say(f"vllm: a model of {parameters:,} parameters; vLLM starts")
    with ExitStack() as stack:
        flags = _vllm_flags(folder, port) | {"engine.vllm.stream_interval": str(options.stream_interval)}
        host = stack.enter_context(engine(folder, "vllm", flags))
        proxy = stack.enter_context(llm_proxy(folder, "proxy", [host], {}))
        prompts = _prompts(options.requests)
        ask = partial(_directly, f"http://127.0.0.1:{port}", prompts)
        farm = partial(_through, client, proxy, prompts, concurrency=max(CONCURRENCIES))
        farm()
        speeds = {each: ask(each) for each in CONCURRENCIES}
        best = max(speeds, key=lambda each: speeds[each])
        _say("vllm: directly " + ", ".join(f"{speed:,.0f} tokens/s at {each}" for each, speed in speeds.items()))
        alone: list[float] = []
        through: list[float] = []
        spent: list[float] = []
        for number in range(options.rounds):
            for is_direct in (True, False) if number % 2 else (False, True):
                if is_direct:
                    alone.append(ask(best))
                    continue
                before = _cpu_seconds(host, proxy)
                through.append(farm())
                spent.append(_cpu_seconds(host, proxy) - before)
            _say(f"vllm: round {number + 1}: directly {alone[-1]:,.0f} tokens/s, through the farm {through[-1]:,.0f}")
    return {
        "vllm_ratio": _ratio(through, alone),
        "vllm_direct_tokens_per_s": round(median(alone)),
        "vllm_farm_tokens_per_s": round(median(through)),
        "vllm_farm_cpu_ms_per_request": round(1000 * median(spent) / options.requests, 2),
        "vllm_best_concurrency": best,
        "vllm_stream_interval": options.stream_interval,
        "vllm_parameters": parameters,
    }


def _cpu_seconds(*servers: Server) -> float:
    """What the farm itself has used; vLLM, a child of its host, is not counted."""
    times = [psutil.Process(server.pid).cpu_times() for server in servers]
    return sum(each.user + each.system for each in times)


def _vllm_flags(folder: Path, port: int) -> dict[str, str]:
    return {
        "model.path": str(folder / "model"),
        "engine.adapter": "vllm",
        "engine.slots": str(VLLM_SLOTS),
        "engine.kv_cache": "512M",
        "engine.vllm.python": str(VLLM_PYTHON),
        "engine.vllm.port": str(port),
        "engine.vllm.start_seconds": "300",
    }


def _prompts(count: int) -> list[Work]:
    chance = random.Random(count)
    return [
        ([chance.randrange(2048) for _ in range(PROMPT_TOKENS)], chance.randint(SHORTEST_OUTPUT, LONGEST_OUTPUT))
        for _ in range(count)
    ]


def _directly(url: str, work: Sequence[Work], concurrency: int) -> float:
    job = json.dumps({"url": url, "work": work, "concurrency": concurrency})
    argv = [str(VLLM_PYTHON), str(ROOT / "load_tests/engine_bench/direct.py")]
    return float(subprocess.run(argv, input=job, stdout=subprocess.PIPE, text=True, check=True).stdout)


def _through(client: ProcessPoolExecutor, proxy: Server, work: Sequence[Work], *, concurrency: int) -> float:
    return client.submit(through_farm, proxy.address, work, concurrency).result()


# two_engines.


def _two_engines(options: argparse.Namespace, folder: Path, client: ProcessPoolExecutor) -> Figures:
    is_real = (os.cpu_count() or 1) >= CORES_FOR_TWO and VLLM_PYTHON.is_file()
    if is_real and not (folder / "model").exists():
        client.submit(make_model, folder / "model").result()
    _say(f"two_engines: {'vLLM' if is_real else 'simulated'}")
    with ExitStack() as stack:
        flags = [_vllm_flags(folder, free_port()) if is_real else _simulated_flags() for _ in range(2)]
        first, second = (stack.enter_context(engine(folder, f"two-{n}", each)) for n, each in enumerate(flags))
        one = stack.enter_context(llm_proxy(folder, "one", [first], {}))
        two = stack.enter_context(llm_proxy(folder, "two", [first, second], {}))
        slots = VLLM_SLOTS if is_real else SLOTS
        prompts = _prompts(options.requests if is_real else 16 * SLOTS)
        ask = partial(_through, client, work=prompts, concurrency=4 * slots)
        ask(one)
        alone, together = zip(*((ask(one), ask(two)) for _ in range(options.rounds)), strict=True)
    return {
        "two_engines_speedup": _ratio(together, alone),
        "two_engines_kind": "vllm" if is_real else "simulated",
        "two_engines_tokens_per_s": round(median(together)),
    }


def _simulated_flags() -> dict[str, str]:
    """Time is compressed by TIME_SCALE, and a token stands for TOKENS_OF_ONE."""
    return {
        "engine.adapter": "simulated",
        "engine.slots": str(SLOTS),
        "engine.simulated.step_seconds": str(STEP_SECONDS),
        "engine.simulated.request_seconds": str(TOKENS_OF_ONE * REAL_REQUEST_SECONDS / TIME_SCALE),
        "engine.simulated.prefill_seconds": "0",
        "engine.simulated.vocabulary_size": str(VOCABULARY),
    }


# scheduling.


def _scheduling(options: argparse.Namespace, folder: Path) -> Figures:
    _say(f"scheduling: {ENGINES} simulated engines of {SLOTS} slots, time compressed {TIME_SCALE:g} times")
    with ExitStack() as stack:
        hosts = [stack.enter_context(engine(folder, f"engine-{n}", _simulated_flags())) for n in range(ENGINES)]
        # A session, which is how a batch keeps a prompt's samples together, never leaves its engine.
        together = {"llm_proxy.affinity_bound_tokens": str(10**9)}
        proxy = stack.enter_context(llm_proxy(folder, "scheduling", hosts, together))
        ways = asyncio.run(_steps(proxy.address, options.steps, options.seed))
    mean = {name: fmean(step.seconds for step in steps) for name, steps in ways.items()}
    return {
        "queue_speedup": round(mean["batch"] / mean["queue"], 2),
        "redundant_speedup": round(mean["batch"] / mean["redundant"], 2),
        "carried_speedup": round(mean["batch"] / mean["carried"], 2),
        "oversampled_speedup": round(mean["batch"] / mean["oversampled"], 2),
        **{f"{name}_step_s": round(seconds * TIME_SCALE, 1) for name, seconds in mean.items()},
        **{f"{name}_prompts": round(fmean(step.prompts for step in steps), 1) for name, steps in ways.items()},
        "batch_rounds": round(fmean(step.rounds for step in ways["batch"]), 2),
        "batch_groups_apart": sum(step.apart for step in ways["batch"]),
        "distribution": DISTRIBUTION,
        "median_tokens": MEDIAN_TOKENS * TOKENS_OF_ONE,
        "most_tokens": CUT * MEDIAN_TOKENS * TOKENS_OF_ONE,
        "time_scale": TIME_SCALE,
        "steps": options.steps,
    }


async def _steps(address: str, count: int, seed: int) -> dict[str, list[Step]]:
    """Every step in each of the ways, in turns."""
    steps: dict[str, list[Step]] = {}
    async with rpc.channel(address) as channel:
        stub: Any = llm_proxy_pb2_grpc.LlmProxyServiceStub(channel)
        samples = Samples(stub, most_tokens=CUT * MEDIAN_TOKENS, vocabulary_size=VOCABULARY)
        for number in range(count):
            prompts = partial(prompt, seed, number, samples=GROUP_SIZE, median=MEDIAN_TOKENS)
            ways = {
                "batch": by_batches(samples, prompts, groups=GROUPS, batch=GROUPS),
                "oversampled": by_batches(samples, prompts, groups=GROUPS, batch=GROUPS + REDUNDANT),
                "queue": by_queue(samples, prompts, groups=GROUPS, running=GROUPS),
                "redundant": by_queue(samples, prompts, groups=GROUPS, running=GROUPS + REDUNDANT),
            }
            done: dict[str, Step] = {}
            for name, way in ways.items():
                done[name] = await way
                await _idle(stub)
            for name, step in done.items():
                steps.setdefault(name, []).append(step)
            took = ", ".join(f"{name} {step.seconds:.2f} s" for name, step in done.items())
            _say(f"scheduling: step {number + 1} of {count}: {took}")
        _say("scheduling: as many steps by a queue that cancels nothing between them")
        prompts = partial(prompt, seed, count, samples=GROUP_SIZE, median=MEDIAN_TOKENS)
        flow = await by_queue(samples, prompts, groups=count * GROUPS, running=GROUPS)
        steps["carried"] = [replace(flow, seconds=flow.seconds / count, prompts=round(flow.prompts / count))]
        samples.close()
    return steps


async def _idle(stub: Any) -> None:
    """Wait until the engines have confirmed what was cancelled: a batch needs every slot."""
    request = llm_proxy_pb2.ListEnginesRequest()
    is_busy = True
    while is_busy:
        await asyncio.sleep(0.02)
        is_busy = any(
            engine.running_count for engine in (await rpc.call(stub.ListEngines, request, timeout=10)).engines
        )


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the rounds."""
    return round(median(our / their for our, their in zip(ours, theirs, strict=True)), 3)


def _say(line: str) -> None:
    print(f"engines.py: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
