"""Trackers for real: what each wrote is read back by its own format, and one that is broken disturbs nobody."""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import pytest
from structlog.testing import capture_logs

from rollfarm.config import ConfigError
from trainer.progress import Progress, StepReport, ValidationReport
from trainer.sample_table import Sample
from trainer.trackers.config import TrackerConfig, build, check
from trainer.trackers.feed import Feed
from trainer.trackers.tracker import TrackedRun, Tracker

SECONDS = 60.0
"""More than any library takes to begin on a busy machine."""


class Noted:
    """A tracker that notes what it is told."""

    package: ClassVar[str] = "json"

    def __init__(self) -> None:
        self.runs: list[TrackedRun] = []
        self.told: list[tuple[str, int]] = []
        self.metrics: dict[int, Mapping[str, float]] = {}
        self.closed = False

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        self.runs.append(run)

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self.told.append(("log", step))
        self.metrics[step] = metrics

    def table(self, step: int, samples: Sequence[Sample], time: float) -> None:
        self.told.append(("table", step))

    def close(self) -> None:
        self.closed = True


class Refuses(Noted):
    """One that cannot take even numbers of steps."""

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        if step % 2 == 0:
            raise OSError("the server is away")
        super().log(step, metrics, time)


class Hangs(Noted):
    """One that never answers, until the test is over."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def log(self, step: int, metrics: Mapping[str, float], time: float) -> None:
        self.entered.set()
        self.released.wait()


class Dead(Noted):
    """One that cannot even begin."""

    def begin(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        raise SystemExit("no key")


def report(step: int) -> StepReport:
    metrics = {"loss": 0.25 * step, "domain/maths/reward": 0.5}
    return StepReport(step, 0.1 * step, metrics, 0.1, 0.2, 0.3, policy_version=step + 1, time=1000.0 + step)


def validation(step_count: int) -> ValidationReport:
    return ValidationReport(step_count, 0.75, {"success": 0.5}, 8, policy_version=1, time=999.5 + step_count)


def sample(step: int) -> Sample:
    return Sample(
        step=step,
        trajectory_id="t1",
        domain="maths",
        environment="arithmetic",
        task=3,
        reward=0.75,
        reward_parts={"exact": 0.75},
        metrics={"success": 1.0},
        outcome="OK",
        policy_version=2,
        engine="engine-0",
        tokens=5,
        text="what is 3 plus 4 <assistant> 7",
    )


def feed_of(tracker: Tracker, folder: Path, *, name: str = "noted", capacity: int = 100) -> Feed:
    return Feed(name, tracker, run="demo", folder=folder, config={"run": {"name": "demo"}}, capacity=capacity)


def progress_of(feed: Feed, folder: Path) -> Progress:
    return Progress("demo", 10, folder / "metrics.jsonl", [feed])


def close(feed: Feed, seconds: float = SECONDS) -> None:
    feed.end()
    feed.close(seconds)


def live(tracker: Tracker, folder: Path, *, name: str, first: int, last: int) -> Feed:
    """One life of a trainer that resumes at step `first` and ends after step `last`, with samples at step 1."""
    feed = feed_of(tracker, folder, name=name)
    progress = progress_of(feed, folder)
    progress.resume(first)
    for step in range(first, last + 1):
        progress.stepped(report(step), [sample(step)] if step == 1 else [])
    if last == 3:
        progress.validated(validation(4))
    close(feed)
    return feed


def test_a_tracker_is_told_of_steps_samples_and_validations_in_order(tmp_path: Path) -> None:
    tracker = Noted()

    feed = live(tracker, tmp_path, name="noted", first=0, last=3)

    assert tracker.told == [("log", 1), ("log", 2), ("table", 2), ("log", 3), ("log", 4), ("log", 4)]
    assert tracker.metrics[2] == {
        "train/reward": 0.1,
        "train/policy_version": 2.0,
        "train/loss": 0.25,
        "domain/maths/reward": 0.5,
        "time/wait_seconds": 0.1,
        "time/train_seconds": 0.2,
        "time/publish_seconds": 0.3,
    }
    assert tracker.metrics[4] == {"validation/reward": 0.75, "validation/episodes": 8.0, "validation/success": 0.5}
    assert tracker.closed
    assert feed.lost == 0


def test_steps_that_a_crash_repeats_are_told_once_and_the_run_keeps_its_id(tmp_path: Path) -> None:
    first, second = Noted(), Noted()
    live(first, tmp_path, name="noted", first=0, last=3)

    live(second, tmp_path, name="noted", first=2, last=5)

    assert [step for verb, step in second.told if verb == "log"] == [5, 6]
    assert second.runs[0].tracking_id == first.runs[0].tracking_id
    assert (first.runs[0].first_step, second.runs[0].first_step) == (0, 4)
    assert [json.loads(line)["step"] for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == [1]


def test_the_very_last_step_that_was_told_is_not_told_again(tmp_path: Path) -> None:
    live(Noted(), tmp_path, name="noted", first=0, last=2)
    second = Noted()

    live(second, tmp_path, name="noted", first=2, last=4)

    assert second.told == [("log", 4), ("log", 5)]


def test_a_tracker_that_is_added_later_or_was_behind_is_told_what_was_measured_before(tmp_path: Path) -> None:
    live(Noted(), tmp_path, name="early", first=0, last=3)
    late = Noted()

    live(late, tmp_path, name="late", first=4, last=4)

    assert late.told == [("log", 1), ("log", 2), ("log", 3), ("log", 4), ("log", 4), ("log", 5)]


def test_a_validation_after_steps_that_are_repeated_is_told_after_them(tmp_path: Path) -> None:
    live(Noted(), tmp_path, name="early", first=0, last=3)
    late = Noted()
    feed = feed_of(late, tmp_path, name="late")
    progress = progress_of(feed, tmp_path)

    progress.resume(2, validated_until=4)
    for step in (2, 3):
        progress.stepped(report(step))
    close(feed)

    assert late.told == [("log", 1), ("log", 2), ("log", 3), ("log", 4), ("log", 4)]
    assert late.metrics[4]["validation/success"] == 0.5


def test_what_a_tracker_refuses_is_counted_and_the_rest_goes_on(tmp_path: Path) -> None:
    tracker = Refuses()

    feed = live(tracker, tmp_path, name="refuses", first=0, last=2)

    assert tracker.told == [("log", 1), ("table", 2), ("log", 3)]
    assert feed.lost == 1
    assert tracker.closed


def test_the_next_life_tells_a_tracker_what_comes_after_the_last_entry_that_it_took(tmp_path: Path) -> None:
    live(Refuses(), tmp_path, name="noted", first=0, last=3)
    second = Noted()

    live(second, tmp_path, name="noted", first=4, last=4)

    # Steps 2 and 4 were refused; only 4 was behind all that was taken.
    assert second.told == [("log", 4), ("log", 4), ("log", 5)]


def test_a_tracker_that_cannot_begin_is_off_and_everything_for_it_is_counted(tmp_path: Path) -> None:
    feed = feed_of(Dead(), tmp_path)
    progress = progress_of(feed, tmp_path)
    with capture_logs() as logs:
        progress.resume(0)
        progress.stepped(report(0))
        close(feed)

    progress.stepped(report(1))

    assert feed.lost >= 1
    assert [each.step for each in progress.steps] == [0, 1]
    assert "tracker is off until the trainer starts again" in [line["event"] for line in logs]


def test_a_tracker_that_could_not_begin_is_told_everything_by_the_next_life(tmp_path: Path) -> None:
    live(Dead(), tmp_path, name="noted", first=0, last=1)
    second = Noted()

    live(second, tmp_path, name="noted", first=2, last=2)

    assert second.told == [("log", 1), ("log", 2), ("log", 3)]


def test_one_that_hangs_drops_what_is_too_much_and_holds_up_neither_a_step_nor_the_end(tmp_path: Path) -> None:
    tracker = Hangs()
    feed = feed_of(tracker, tmp_path, capacity=3)
    progress = progress_of(feed, tmp_path)
    progress.resume(0)
    progress.stepped(report(0))
    assert tracker.entered.wait(SECONDS)
    began = time.monotonic()

    for step in range(1, 10):
        progress.stepped(report(step))
    close(feed)
    took = time.monotonic() - began
    tracker.released.set()

    assert took < 5
    assert feed.lost == 9
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 10


@pytest.mark.parametrize(
    ("trackers", "message"),
    [
        ([{"name": "wandbb"}], "Unknown tracker 'wandbb'. Did you mean 'wandb'?"),
        ([{"name": "wandb", "settings": {"projct": "x"}}], "unknown setting 'projct'. Did you mean 'project'?"),
        ([{"name": "wandb", "settings": {"mode": "of"}}], "wandb: wrong setting mode"),
        ([{"name": "tensorboard"}, {"name": "tensorboard"}], "two are named 'tensorboard'"),
        ([{"name": "tests.trainer.test_trackers:Missing"}], "pip install"),
    ],
)
def test_a_wrong_tracker_is_found_before_anything_starts(trackers: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.trackers\[\d\]: ") as found:
        check([TrackerConfig.model_validate(each) for each in trackers])

    assert message in str(found.value)


class Missing(Noted):
    package: ClassVar[str] = "no_such_package"


def two_lives(name: str, folder: Path, settings: dict[str, Any]) -> None:
    """Steps 0 to 3 and a validation; then, from a checkpoint of step 2 on, steps 2 to 5."""
    for first, last in ((0, 3), (2, 5)):
        feed = live(build(TrackerConfig(name=name, settings=settings)), folder, name=name, first=first, last=last)
        assert feed.lost == 0


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"needs {package}")


@needs("tensorboard")
def test_tensorboard_has_every_step_once_and_the_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    two_lives("tensorboard", tmp_path, {})

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("train/loss")] == [
        (step + 1, pytest.approx(0.25 * step)) for step in range(6)
    ]
    assert [each.step for each in events.Scalars("validation/success")] == [4]
    samples = events.Tensors("samples/text_summary")
    assert [each.step for each in samples] == [2]
    assert b"what is 3 plus 4" in samples[0].tensor_proto.string_val[0]


@needs("wandb")
@pytest.mark.slow
def test_wandb_offline_has_every_step_once_in_one_run_and_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")

    two_lives("wandb", tmp_path, {"mode": "offline", "project": "tests"})

    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    rows = [row for file in files for row in _wandb_history(file)]
    losses = [(row["steps_done"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(step + 1, 0.25 * step) for step in range(6)]
    assert [row["steps_done"] for row in rows if "validation/success" in row] == [4]
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    tables = [json.loads(file.read_text()) for file in (tmp_path / "wandb").glob("offline-run-*/files/media/table/*")]
    assert [table["data"][0][-1] for table in tables] == ["what is 3 plus 4 <assistant> 7"]


def _wandb_history(file: Path) -> list[dict[str, Any]]:
    """The rows of a .wandb file: a LevelDB log of protobuf records behind a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, position, whole = file.read_bytes(), 7, b""
    rows: list[dict[str, Any]] = []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        size, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = Record.FromString(whole)
            whole = b""
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_has_every_step_once_in_one_run_and_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()

    two_lives("mlflow", tmp_path, {"tracking_uri": uri, "experiment": "tests"})

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tests")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    losses = [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "train/loss")]
    assert losses == [(step + 1, 0.25 * step) for step in range(6)]
    assert run.info.status == "FINISHED"
    (table,) = (tmp_path / "mlruns").rglob("samples/000002.json")
    assert json.loads(table.read_text())[0]["text"] == "what is 3 plus 4 <assistant> 7"


@needs("trackio")
def test_trackio_has_every_step_once_in_one_run_and_the_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trackio import utils  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    project = f"tests-{tmp_path.name}"

    two_lives("trackio", tmp_path, {"project": project})

    try:
        (run,) = SQLiteStorage.get_runs(project)
        logs = SQLiteStorage.get_logs(project, run)
        losses = [(row["step"], row["train/loss"]) for row in logs if "train/loss" in row]
        assert losses == [(step + 1, 0.25 * step) for step in range(6)]
        (table,) = [row["samples"] for row in logs if "samples" in row]
        assert table["_value"][0]["text"] == "what is 3 plus 4 <assistant> 7"
    finally:
        for file in Path(utils.TRACKIO_DIR).glob(f"{project}*"):
            file.unlink()


@needs("swanlab")
@pytest.mark.slow
def test_swanlab_offline_has_every_step_once_and_the_samples(tmp_path: Path) -> None:
    two_lives("swanlab", tmp_path, {"mode": "offline", "project": "tests"})

    lives = [file.read_bytes() for file in sorted((tmp_path / "swanlab").glob("run-*/*.swanlab"))]
    # Each life names the figure once where it declares it, and once for each step.
    assert sorted(life.count(b"train/loss") for life in lives) == [1 + 2, 1 + 4]
    (text,) = (tmp_path / "swanlab").glob("run-*/media/text/*.txt")
    assert text.read_text() == "what is 3 plus 4 <assistant> 7"
