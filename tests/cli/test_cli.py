import os
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from rollfarm.cli import COMMANDS
from rollfarm.ports import is_free

ROOT = Path(__file__).parents[2]


@pytest.fixture
def taken() -> Iterator[int]:
    """The base port of a farm whose trainer's port is taken, below the ports that connections are given."""
    base = next(base for base in range(20_000, 32_000, 100) if all(is_free(base + offset) for offset in range(20)))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", base + 5))
        listener.listen()
        yield base


def rollfarm(
    *arguments: object, program: tuple[str, ...] = ("-m", "rollfarm"), **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def without(*modules: str) -> tuple[str, ...]:
    """How to start rollfarm where these modules are not installed."""
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in modules)
    return "-c", f"import sys; {blocked}from rollfarm.cli import main; sys.exit(main())"


def modules_of_extras() -> list[str]:
    """Everything importable that the core dependencies do not bring."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (requirement for wanted in project["optional-dependencies"].values() for requirement in wanted)
    names = {re.split(r"[\[<>=]", requirement)[0] for requirement in extras} - {"rollfarm"}
    normal = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    return [
        module
        for module, distributions in metadata.packages_distributions().items()
        if {re.sub(r"[-_.]+", "-", name).lower() for name in distributions} <= normal
    ]


def cpu_seconds(*command: str) -> float:
    """Of our children, which is unlike wall time the same on a busy machine."""
    before = os.times()
    subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=["rollfarm", *COMMANDS])
def test_help_comes_at_once(command: list[str]) -> None:
    spent = min(cpu_seconds("-m", "rollfarm", *command, "--help") for _ in range(2))

    # A bare interpreter takes a tenth of this, and one import of pydantic alone three times as much.
    assert spent < max(0.25, 10 * cpu_seconds("-c", "pass"))


def test_help_names_every_command() -> None:
    shown = rollfarm("--help").stdout

    assert all(f"  {name} " in shown for name in COMMANDS)


def test_an_unknown_command_is_refused() -> None:
    refused = rollfarm("upp")

    assert refused.returncode == 2
    assert "up, train, resume, evaluate, status" in refused.stderr.replace("'", "")


def test_an_unknown_key_ends_up_with_status_2_and_the_nearest_name(farm_file: Path) -> None:
    refused = rollfarm("up", farm_file, "--engine.slot", 3)

    assert refused.returncode == 2
    assert "--engine.slot: unknown flag. Did you mean --engine.slots?" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_missing_file_ends_up_with_status_2(tmp_path: Path) -> None:
    refused = rollfarm("up", tmp_path / "none.toml")

    assert refused.returncode == 2
    assert "no such file" in refused.stderr


def test_a_port_in_use_ends_up_with_status_3_before_anything_is_made(
    farm_file: Path, tmp_path: Path, taken: int
) -> None:
    refused = rollfarm("up", farm_file, "--up.base_port", taken)

    assert refused.returncode == 3
    assert f"Port in use: {taken + 5} (trainer)." in refused.stderr
    assert f"--up.base_port {taken + 100}" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["farm.toml"]


def test_a_finished_run_is_said_to_be_finished_with_the_ways_to_go_on(farm_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "summary.json").write_text('{"finished": true, "steps": 100}')

    refused = rollfarm("up", farm_file)

    assert refused.returncode == 2
    assert "is finished (100 steps)" in refused.stderr
    for remedy in ("--up.fresh true", "--run.name", "--run.steps 200"):
        assert remedy in refused.stderr


def test_a_fresh_start_never_deletes_what_no_run_made(farm_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "small"
    run.mkdir(parents=True)
    (run / "thesis.txt").write_text("years of work")

    refused = rollfarm("up", farm_file, "--up.fresh", "true", "--up.base_port", 17700)

    assert refused.returncode == 2
    assert "is not a run" in refused.stderr
    assert (run / "thesis.txt").exists()


def test_up_lists_every_key_with_its_meaning() -> None:
    shown = rollfarm("up", "--flags").stdout

    assert "--up.engines  = 1" in shown
    assert "--trainer.lr " in shown
    assert "Learning rate" in shown or "learning rate" in shown


def test_up_names_the_libraries_that_it_lacks_before_anything_starts(farm_file: Path, tmp_path: Path) -> None:
    refused = rollfarm("up", farm_file, program=without("matplotlib", "tomli_w"))

    assert refused.returncode == 2
    assert "matplotlib and tomli_w" in refused.stderr
    assert "pip install '.[all]'" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["farm.toml"]


def test_status_of_no_farm_says_how_to_start_one() -> None:
    shown = rollfarm("status", "--up.base_port", 17700)

    assert shown.returncode == 1
    assert "sample_buffer at 127.0.0.1:17703" in shown.stdout
    assert "Start a farm with `rollfarm up`" in shown.stdout


def test_inspect_without_a_farm_says_that_one_has_to_run() -> None:
    shown = rollfarm("inspect", "--address", "127.0.0.1:17703")

    assert shown.returncode == 1
    assert "while the farm runs" in shown.stderr


@pytest.mark.parametrize("command", [["status"], ["inspect", "--config"]], ids=["status", "inspect"])
def test_a_file_that_is_not_there_is_named(command: list[str]) -> None:
    refused = rollfarm(*command, "nosuch.toml")

    assert refused.returncode == 2
    assert "nosuch.toml: no such file." in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("command", [["status"], ["inspect", "--config"]], ids=["status", "inspect"])
def test_a_farm_is_looked_for_by_the_file_and_the_flags_that_started_it(command: list[str], farm_file: Path) -> None:
    shown = rollfarm(*command, farm_file, "--up.base_port", 17700, "--run.alpha", 2)

    assert shown.returncode == 1
    assert "127.0.0.1:17703" in shown.stdout + shown.stderr


@pytest.mark.parametrize("command", ["status", "inspect", "doctor"])
def test_looking_at_a_farm_needs_the_core_dependencies_alone(command: str) -> None:
    shown = rollfarm(command, "--up.base_port", 17700, program=without(*modules_of_extras()))

    assert shown.returncode == 1
    assert "Traceback" not in shown.stderr
    assert "1770" in shown.stdout + shown.stderr


def test_doctor_names_a_taken_port_and_the_remedy(farm_file: Path, taken: int) -> None:
    shown = rollfarm("doctor", farm_file, "--up.base_port", taken)

    assert shown.returncode == 1
    assert "(trainer)" in shown.stdout
    assert f"--up.base_port {taken + 100}" in shown.stdout


def test_doctor_names_a_journal_that_does_not_answer(farm_file: Path) -> None:
    shown = rollfarm("doctor", farm_file, "--sample_buffer.journal", "redis://127.0.0.1:1", "--up.base_port", 17700)

    assert shown.returncode == 1
    assert "correct sample_buffer.journal" in shown.stdout


def test_doctor_names_a_torch_that_cannot_be_imported(farm_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "torch.py").write_text("raise OSError('libcudart.so.12: cannot open shared object file')")

    shown = rollfarm("doctor", farm_file, "--up.base_port", 17700, PYTHONPATH=str(broken))

    assert shown.returncode == 1
    assert "fail  torch         OSError: libcudart.so.12" in shown.stdout
    assert "pip install torch==" in shown.stdout
    assert "fail  engine " in shown.stdout


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_doctor_names_an_interpreter_without_the_inference_server(farm_file: Path, server: str) -> None:
    flags = "--engine.adapter", server, f"--engine.{server}.python", sys.executable

    shown = rollfarm("doctor", farm_file, "--up.base_port", 17700, *flags)

    assert shown.returncode == 1
    assert f"No package metadata was found for {server}" in shown.stdout
    assert f"make {server}" in shown.stdout


def test_doctor_needs_no_interpreter_where_a_vllm_is_attached(farm_file: Path) -> None:
    attached = "--engine.adapter", "vllm", "--engine.vllm.url", "http://127.0.0.1:8000"

    shown = rollfarm("doctor", farm_file, "--up.base_port", 17700, *attached, "--engine.vllm.python", "/nowhere")

    assert "ok   engine        vLLM at http://127.0.0.1:8000" in shown.stdout


def test_a_healthy_machine_passes_and_says_what_it_computes_with(farm_file: Path) -> None:
    shown = rollfarm("doctor", farm_file, "--up.base_port", 17700)

    assert shown.returncode == 0, shown.stdout
    assert re.search(r"ok   torch +\d\S+, transformers \d\S+, device (cpu|cuda .+)\n", shown.stdout)
    assert "This machine can run the farm." in shown.stdout


def test_an_evaluation_explains_itself_and_refuses_what_cannot_be_estimated(farm_file: Path) -> None:
    assert "trainer.evaluation.samples" in rollfarm("evaluate", "--help").stdout

    refused = rollfarm("evaluate", farm_file, "--trainer.evaluation.k", "[64]")

    assert refused.returncode == 2
    assert "pass@64 cannot be estimated from 8 samples" in refused.stderr
