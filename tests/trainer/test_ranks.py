"""Two ranks as real processes that meet by gloo."""

import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.trainer.backends import SECONDS, start, start_ranks, train

pytestmark = pytest.mark.slow


def exported(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "export" / "model.safetensors")


def test_two_ranks_learn_exactly_what_one_learns(model_path: Path, tmp_path: Path) -> None:
    alone = train(model_path, tmp_path / "alone", "0-3", {})
    together = train(model_path, tmp_path / "together", "0-3", {}, world_size=2)

    assert together.steps[-1] == pytest.approx(alone.steps[-1], abs=1e-5)
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
    ones, twos = exported(alone.folder), exported(together.folder)
    assert all(torch.allclose(ones[name], twos[name], atol=1e-4) for name in ones)


def test_ranks_that_end_right_after_their_last_words_end_well() -> None:
    # Where nothing lets the last words be heard out, about every second pair has a rank that aborts.
    for _ in range(6):
        ranks = start_ranks([sys.executable, "-m", "tests.trainer.meeting_rank"], 2)
        errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_batch_of_fewer_rows_than_ranks_is_trained_on_too(model_path: Path, tmp_path: Path) -> None:
    trained = train(model_path, tmp_path, "0-1", {}, world_size=2, rows=1)

    assert trained.steps[0]["skipped"] == 0


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_takes_the_other_down(model_path: Path, tmp_path: Path, victim: int) -> None:
    ranks = start(model_path, tmp_path, "forever", {}, world_size=2)
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline().strip() == "begun"

    ranks[victim].send_signal(signal.SIGKILL)

    assert ranks[1 - victim].wait(timeout=60) not in (0, None)
    for rank in ranks:
        rank.communicate()


def test_a_part_of_a_checkpoint_that_another_rank_cannot_write_is_an_error_on_rank_0(
    model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "save" / "rng-1.safetensors").mkdir(parents=True)

    ranks = start(model_path, tmp_path, "0-1", {}, world_size=2)

    errors = [rank.communicate(timeout=SECONDS)[1] for rank in ranks]
    assert "Is a directory (rank 1)" in errors[0]
    assert ranks[0].returncode == 1


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_checkpoint_is_gone_on_from_by_another_number_of_ranks(
    model_path: Path, tmp_path: Path, before: int, after: int
) -> None:
    straight = train(model_path, tmp_path / "straight", "0-4", {})
    first = train(model_path, tmp_path / "first", "0-2", {}, world_size=before)
    second = tmp_path / "second"
    second.mkdir()
    (second / "load").symlink_to(first.folder / "save")

    resumed = train(model_path, second, "2-4", {}, world_size=after)

    assert resumed.losses == pytest.approx(straight.losses[2:], abs=1e-5)
