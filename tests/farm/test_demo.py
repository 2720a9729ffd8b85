"""The demo as a person runs it: it learns, its services are separate, and its negative control does not learn."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.farm.conftest import CHECKOUT, SERVICES, Farm, StartFarm

DEMO = CHECKOUT / "examples" / "demo.toml"

Address = tuple[str, int]

HOUSE = {
    frozenset(pair)
    for pair in (
        ("env_manager", "sample_buffer"),
        ("env_manager", "llm_proxy"),
        ("env_manager", "reward_gateway"),
        ("llm_proxy", "llm_proxy.engine"),
        ("trainer", "sample_buffer"),
        ("trainer", "llm_proxy"),
        ("trainer", "llm_proxy.engine"),
    )
}
"""Who talks to whom: the trainer and the engine about weights alone."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_demo_learns_with_separate_services_that_talk_through_sockets_alone(start_farm: StartFarm):
    farm = start_farm(DEMO)

    farm.wait_for_step(2, seconds=120)
    pids = {module: farm.pids(module) for module in SERVICES}
    shared = _shared_between([pid for found in pids.values() for pid in found])
    links = _links(pids)
    generated_while_training = _tokens_during_training(farm)
    first_version = farm.proxy().policy_version
    farm.wait_until(lambda: farm.proxy().policy_version > first_version, seconds=60)
    spans = [len(turn.version_spans) for t in farm.trajectories(500) for turn in t.turns]
    versions = {len({s.policy_version for turn in t.turns for s in turn.version_spans}) for t in farm.trajectories(500)}
    status, summary = farm.finish(seconds=400)

    assert all(len(found) == 1 for found in pids.values()), pids
    assert shared == set()
    assert links == HOUSE
    assert generated_while_training > 0
    assert spans, "nothing was retained"
    assert max(versions) >= 2, "no episode went on across a change of weights"
    assert status == 0
    assert summary["reward_after"] - summary["reward_before"] >= 0.3
    assert summary["max_staleness"] == 1
    assert summary["samples"] == summary["steps"] * 8 * 8
    _assert_run_folder(farm.run, summary)


def test_the_negative_control_fails_the_same_threshold(start_farm: StartFarm):
    farm = start_farm(DEMO, "--trainer.shuffle_scores", "true")

    status, summary = farm.finish(seconds=500)

    assert status == 1
    assert summary["reward_after"] - summary["reward_before"] < 0.05


def _shared_between(pids: list[int]) -> set[str]:
    """Whatever two services hold in common by which they could talk past their sockets: pipes and shared memory."""
    seen: dict[str, int] = {}
    shared: set[str] = set()
    for pid in pids:
        for thing in _pipes(pid) | _shared_maps(pid):
            if seen.setdefault(thing, pid) != pid:
                shared.add(thing)
    return shared


def _pipes(pid: int) -> set[str]:
    """Pipes beyond the standard streams, whose other ends only the supervisor holds."""
    inherited = [fd for fd in Path(f"/proc/{pid}/fd").iterdir() if int(fd.name) > 2]
    return {target for fd in inherited if (target := str(fd.readlink())).startswith("pipe:")}


def _shared_maps(pid: int) -> set[str]:
    """Of files. Anonymous inodes, such as the rings to the kernel of an event loop, have one name in every process."""
    lines = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    names = {line[5] for line in lines if line[1].startswith("rw-s") and len(line) > 5}
    return {name for name in names if not name.startswith("anon_inode:")}


def _links(pids: dict[str, list[int]]) -> set[frozenset[str]]:
    """The pairs of services between which a TCP connection stands: each holds one end of it."""
    held: dict[tuple[Address, Address], str] = {}
    for module, found in pids.items():
        for pid in found:
            for each in psutil.Process(pid).net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED:
                    held[_address(each.laddr), _address(each.raddr)] = module
    pairs = {frozenset({module, held.get((there, here), module)}) for (here, there), module in held.items()}
    return {pair for pair in pairs if len(pair) == 2}


def _address(end: Any) -> Address:
    """One spelling for an IPv4 address, which a socket of IPv6 maps."""
    return end.ip.removeprefix("::ffff:"), end.port


def _tokens_during_training(farm: Farm) -> int:
    """Tokens that the engine made between two looks at a trainer that was in one training step all the while."""
    found = 0

    def looked() -> bool:
        nonlocal found
        before, tokens = farm.progress(), farm.proxy().generated_token_count
        after = farm.progress()
        if before.phase == after.phase == 5 and before.step_count == after.step_count:
            found += farm.proxy().generated_token_count - tokens
        return found > 0

    farm.wait_until(looked, seconds=60)
    return found


def _assert_run_folder(run: Path, summary: dict[str, object]) -> None:
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("mean_reward" in line for line in metrics) >= 1
    assert (run / "config.toml").is_file()
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    report = (run / "report.html").read_text()
    assert "data:image/png;base64," in report
    assert 'src="http' not in report
    assert 'href="http' not in report
    assert any((run / "checkpoints").iterdir())
    assert Path(str(summary["run"])) == run
