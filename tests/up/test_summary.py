import json
import re
from io import StringIO
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from rich.console import Console

from rollfarm.up import report, summary
from rollfarm.up.console import Screen, chart, clock_text, flow, number_text, plain_line, resample, sparkline
from rollfarm.up.farm import ProcessSpec
from rollfarm.up.process import Child, State
from rollfarm.up.summary import Ending, Summary
from rollfarm.up.watch import Failures, Picture, Rate, Standstill
from rollfarm.v1 import environment_pb2, llm_proxy_pb2, sample_buffer_pb2, trainer_pb2


def step(number: int, reward: float) -> trainer_pb2.StepMetrics:
    return trainer_pb2.StepMetrics(
        step=number,
        mean_reward=reward,
        wait_duration=Duration(seconds=1),
        train_duration=Duration(seconds=2),
        publish_duration=Duration(nanos=500_000_000),
    )


def validation(steps: int, success: float) -> trainer_pb2.Validation:
    return trainer_pb2.Validation(
        step_count=steps, mean_reward=success / 2, metrics={"success": success}, episode_count=64
    )


@pytest.fixture
def picture() -> Picture:
    """Four steps of a run that is over."""
    picture = Picture()
    picture.learn(
        trainer_pb2.GetProgressResponse(
            run_id="lake",
            phase=trainer_pb2.PHASE_FINISHED,
            step_count=4,
            total_step_count=4,
            steps=[step(number, 0.1 * number) for number in range(4)],
            validations=[validation(0, 0.125), validation(4, 0.75)],
        ),
        now=100.0,
    )
    picture.buffer = sample_buffer_pb2.GetStatusResponse(
        policy_version=5,
        credit_count=16,
        credits_in_use_count=14,
        committed_trajectory_count=512,
        max_staleness=1,
        staleness_counts={0: 128, 1: 384},
        dropped_group_counts={"zero_variance": 2},
        outcome_counts={"OUTCOME_OK": 500, "OUTCOME_ENV_FAILED": 3},
    )
    picture.proxy = llm_proxy_pb2.LlmProxyServiceGetStatusResponse(queued_count=3, running_count=8)
    picture.tokens.add(99.0, 0)
    picture.tokens.add(100.0, 3000)
    return picture


def summarise(picture: Picture, metric: str = "success", ending: Ending = Ending.FINISHED) -> Summary:
    return summary.summarise(
        picture,
        ending,
        metric=metric,
        wall_s=30.0,
        learning_s=20.0,
        restarts=1,
        resumed=False,
        run=Path("runs/lake"),
    )


def test_the_summary_tells_what_the_services_said_last(picture: Picture) -> None:
    result = summarise(picture)

    assert (result.reward_before, result.reward_after, result.gain) == (0.125, 0.75, 0.625)
    assert (result.steps, result.samples, result.max_staleness, result.policy_version) == (4, 512, 1, 5)
    assert (result.waiting_s, result.training_s, result.publishing_s) == (4.0, 8.0, 2.0)
    assert (result.tokens, result.tokens_per_s) == (3000, 150.0)


def test_the_last_line_is_one_json_object_with_the_promised_keys(picture: Picture) -> None:
    line = summarise(picture).line()

    assert "\n" not in line
    promised = {"reward_before", "reward_after", "steps", "samples", "max_staleness", "wall_s", "run"}
    told = json.loads(line)
    assert promised | {"restarts", "policy_version", "resumed"} <= told.keys()
    assert (told["ending"], told["finished"]) == ("finished", True)


def test_the_reward_is_reported_when_it_is_the_measure(picture: Picture) -> None:
    result = summarise(picture, metric="reward")

    assert (result.reward_before, result.reward_after) == (0.0625, 0.375)


def test_a_measure_that_the_environment_does_not_have_is_not_measured_and_the_known_ones_are_named(picture: Picture):
    result = summarise(picture, metric="sucess")

    assert (result.reward_before, result.reward_after) == (None, None)
    assert dict(summary.lines(result, 0.3))["sucess"] == "not measured; known: reward, success"
    assert result.missed(0.0) == ""
    assert result.missed(0.3) == (
        "up.min_gain asks for a rise by 0.3, and the sucess was not measured; known: reward, success."
    )


@pytest.mark.parametrize(("min_gain", "missed"), [(0.0, ""), (0.625, ""), (0.7, "The success did not rise by 0.7.")])
def test_a_gain_below_the_one_asked_for_is_missed(picture: Picture, min_gain: float, missed: str) -> None:
    assert summarise(picture).missed(min_gain) == missed


def test_a_gain_that_was_not_measured_is_missed(picture: Picture) -> None:
    assert picture.progress is not None
    del picture.progress.validations[1:]

    result = summarise(picture)

    assert result.reward_after is None
    assert "was not validated after" in result.missed(0.1)
    assert result.missed(0.0) == ""


@pytest.mark.parametrize("ending", [Ending.INTERRUPTED, Ending.TIME_LIMIT, Ending.FAILED])
def test_a_run_that_can_go_on_is_not_judged(picture: Picture, ending: Ending) -> None:
    result = summarise(picture, ending=ending)

    assert not result.finished
    assert result.missed(0.7) == ""
    assert dict(summary.lines(result, 0.7))["success"] == "0.125 before, 0.750 after (+0.625)"


def test_a_finished_run_is_recognised_by_its_summary(picture: Picture, tmp_path: Path) -> None:
    assert summary.finished_summary(tmp_path) is None
    summary.write(summarise(picture, ending=Ending.FAILED), tmp_path)
    assert summary.finished_summary(tmp_path) is None

    summary.write(summarise(picture), tmp_path)

    found = summary.finished_summary(tmp_path)
    assert found is not None
    assert found["steps"] == 4


def test_people_read_the_rise_and_where_the_time_went(picture: Picture) -> None:
    said = dict(summary.lines(summarise(picture), 0.3))

    assert said["success"] == "0.125 before, 0.750 after (+0.625, at least 0.3 asked for)"
    assert said["time"] == "0:30 in all; trainer: waiting 29%, training 57%, publishing 14%"


def test_the_report_is_one_file_with_the_curve_and_the_config_inside(picture: Picture, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nname = "<lake>"\n')

    report.write(summarise(picture), tmp_path)

    page = (tmp_path / report.PAGE).read_text()
    assert (tmp_path / report.CURVE).read_bytes().startswith(b"\x89PNG")
    assert "data:image/png;base64," in page
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "&lt;lake&gt;" in page
    assert "<lake>" not in page


def test_a_run_that_took_no_step_has_a_report_too(tmp_path: Path) -> None:
    report.write(summarise(Picture()), tmp_path)

    assert "No step was taken." in (tmp_path / report.PAGE).read_text()


def test_the_report_draws_and_names_only_what_was_measured(picture: Picture, tmp_path: Path) -> None:
    report.write(summarise(picture, metric="sucess", ending=Ending.FAILED), tmp_path)

    page = (tmp_path / report.PAGE).read_text()
    assert "<p>sucess before</p><strong>–</strong>" in page
    assert "failed; go on with" in page


def test_steps_that_a_crash_undid_leave_the_curve(picture: Picture) -> None:
    picture.learn(trainer_pb2.GetProgressResponse(step_count=2, steps=[step(1, 0.7)]), now=101.0)

    assert picture.rewards() == [0.0, 0.7]


def test_time_left_follows_from_the_pace_of_the_last_steps() -> None:
    picture = Picture()
    waiting = trainer_pb2.PHASE_WAITING
    picture.learn(trainer_pb2.GetProgressResponse(phase=waiting, total_step_count=40), now=0.0)
    assert picture.seconds_left() is None

    two = [step(0, 0.1), step(1, 0.2)]
    picture.learn(trainer_pb2.GetProgressResponse(phase=waiting, step_count=2, total_step_count=40, steps=two), now=7.0)

    assert picture.seconds_left() == 38 * 3.5


def test_a_counter_that_falls_was_restarted_and_its_total_goes_on() -> None:
    rate = Rate()
    for now, count in ((0, 0), (1, 100), (2, 300), (3, 50), (4, 150)):
        rate.add(now, count)

    assert rate.total == 450
    assert rate.per_second() == 100.0


def test_a_plain_line_tells_the_essentials(picture: Picture) -> None:
    line = plain_line(picture, [])

    for part in ("step 4/4", "reward 0.30", "version 5", "credits 14/16", "max lag 1", "3+8 generations", "3000 tok/s"):
        assert part in line


def test_the_flow_shows_shares_of_staleness(picture: Picture) -> None:
    assert dict(flow(picture))["staleness"] == "0: 25%, 1: 75%  (at most 1)"


def test_dropped_groups_are_told_with_their_reasons_most_first(picture: Picture) -> None:
    assert picture.buffer is not None
    assert dict(flow(picture))["samples"] == "512 committed, 2 groups dropped (zero_variance)"

    picture.buffer.dropped_group_counts.update({"stale": 1, "failed": 3})

    assert dict(flow(picture))["samples"].endswith(", 6 groups dropped (3 failed, 2 zero_variance, 1 stale)")


@pytest.mark.parametrize(("width", "head"), [(80, "service         state  "), (110, "service         state    pid")])
def test_the_screen_cuts_nothing_off(picture: Picture, width: int, head: str) -> None:
    picture.learn(
        trainer_pb2.GetProgressResponse(step_count=90, steps=[step(number, number / 90) for number in range(90)]), 101.0
    )
    child = Child(ProcessSpec("reward_gateway", ("x",), stage=0), Path())
    child.enter(State.RUNNING)
    child.restarts = 2
    console = Console(width=width, record=True, file=StringIO())

    console.print(Screen("lake", picture, [child], began=0.0))

    shown = console.export_text()
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    assert head in shown
    for part in ("reward_gateway  running", "policy version  5", "0: 25%, 1: 75%  (at most 1)", "reward 0.99"):
        assert part in shown
    assert ("×2" in shown) == (width == 80)


def test_a_chart_spans_from_the_lowest_to_the_highest_value() -> None:
    assert chart([0.0, 1.0], width=10, rows=2) == [" █", "▁█"]
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█"
    assert sparkline([1.0, 1.0], 10) == "▁▁"


def test_long_curves_are_averaged_to_the_width() -> None:
    assert resample([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]


def test_times_and_numbers_are_short() -> None:
    assert [clock_text(seconds) for seconds in (0, 65, 7265)] == ["0:00", "1:05", "2:01:05"]
    assert [number_text(value) for value in (950, 9_999, 12_300, 4_560_000)] == ["950", "9999", "12.3k", "4.56M"]


def test_failures_are_counted_since_the_last_episode_that_was_played_well() -> None:
    failures = Failures()

    for played, dropped in ((0, 3), (5, 4), (5, 6)):
        failures.add(
            sample_buffer_pb2.GetStatusResponse(
                outcome_counts={"OUTCOME_TRUNCATED": played}, dropped_group_counts={"failed": dropped}
            )
        )

    assert failures.in_a_row == 2


def test_failures_of_an_earlier_part_of_the_run_are_behind_it() -> None:
    failures = Failures()

    for dropped in (20, 21):
        failures.add(sample_buffer_pb2.GetStatusResponse(dropped_group_counts={"failed": dropped}))

    assert failures.in_a_row == 1
    assert not failures.any_played


def test_a_farm_stands_still_while_every_environment_that_was_asked_for_is_suspended() -> None:
    def manager(**suspended: bool) -> environment_pb2.EnvManagerServiceGetStatusResponse:
        return environment_pb2.EnvManagerServiceGetStatusResponse(
            environments=[
                environment_pb2.EnvironmentStatus(name="never_asked"),
                *(
                    environment_pb2.EnvironmentStatus(
                        name=name, suspended=value, ended_count_by_outcome={"OUTCOME_ENV_FAILED": 1}
                    )
                    for name, value in suspended.items()
                ),
            ]
        )

    standstill = Standstill()
    standstill.look(1.0, [manager()])
    assert standstill.seconds(2.0) == 0
    standstill.look(3.0, [manager(lake=True), manager(lake=False)])
    assert standstill.seconds(4.0) == 0
    standstill.look(5.0, [manager(lake=True), manager(shop=True)])
    standstill.look(7.0, [manager(lake=True)])
    assert standstill.seconds(8.0) == 3.0
    standstill.look(9.0, [manager(lake=False)])
    assert standstill.seconds(10.0) == 0
