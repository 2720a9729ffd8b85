"""Training on records: what is learnt of them, checked by hand, in float64 and against autograd."""

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollfarm.config import ConfigError
from rollfarm.run import ModelConfig, RunConfig
from rollfarm.up.config import load_farm
from tests.trainer.conftest import ROOT
from tests.trainer.test_offline_texts import GO, SOURCE, said
from trainer import wiring
from trainer.algorithms.preferences import dpo
from trainer.backends.build import build_models
from trainer.checkpoints import Checkpoints, CheckpointState
from trainer.config import TrainerConfig, TrainerRoot
from trainer.offline import run as offline_run
from trainer.offline.data import Data, Sieve, load_data
from trainer.offline.deck import Deck
from trainer.offline.pipelines import OBJECTIVES, Imitation, Preference, demonstration, pipeline_of, preference
from trainer.offline.run import OfflineRun, check_same
from trainer.progress import Progress
from trainer.ranks import Leader, Role
from trainer.rows import Row
from trainer.texts import Item, Renderer


def offline(path: Path, **settings: Any) -> TrainerConfig:
    table = {"device": "cpu", "max_grad_norm": 0, "offline": {"records": [{"source": "unread.jsonl"}], **settings}}
    if settings["pipeline"] == "distillation":
        table["teacher"] = {"path": str(path)}
    return TrainerConfig.model_validate(table)


def sums(path: Path) -> dict[str, str]:
    """The table of a data set."""
    path.write_text("\n".join(json.dumps({"prompt": f"{n}", "completion": "up"}) for n in range(10)))
    return {"source": str(path)}


# --- the order of records ---


def test_an_epoch_has_every_record_as_often_as_its_weight_says() -> None:
    deck = Deck([4, 3], [1.0, 2.0], seed=1, shuffle=True)

    epochs = [
        [deck.batch(step, 5)[i] for step in range(10 * e // 5, 10 * (e + 1) // 5) for i in range(5)] for e in (0, 1)
    ]

    assert deck.epoch_size == 10
    for numbers in epochs:
        assert sorted(numbers) == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6]
    assert epochs[0] != epochs[1]


def test_records_of_half_weight_all_come_within_two_epochs() -> None:
    deck = Deck([6], [0.5], seed=3, shuffle=True)

    assert deck.epoch_size == 3
    assert sorted(deck.batch(0, 6)) == [0, 1, 2, 3, 4, 5]


def test_batches_are_a_function_of_the_step_and_reach_over_the_ends_of_epochs() -> None:
    deck = Deck([5], [1.0], seed=0, shuffle=False)

    assert deck.steps(2, 4) == 3
    assert [deck.batch(step, 4) for step in range(3)] == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_a_run_that_is_given_more_epochs_goes_on_with_the_very_next_record() -> None:
    deck = Deck([10], [1.0], seed=0, shuffle=True)
    once, thrice = deck.steps(1, 4), deck.steps(3, 4)

    begun = [number for step in range(once) for number in deck.batch(step, 4)]
    numbers = begun + [number for step in range(once, thrice) for number in deck.batch(step, 4)]

    assert (once, thrice) == (3, 8)
    for epoch in range(3):
        assert sorted(numbers[10 * epoch : 10 * epoch + 10]) == list(range(10))


def test_records_that_are_held_out_are_never_trained_on(tmp_path: Path) -> None:
    loaded = loaded_by(offline(tmp_path, pipeline="sft", validation_share=0.3, records=[sums(tmp_path / "d.jsonl")]))

    assert len(loaded.held_out) == 3
    assert loaded.identity["counts"] == [7]
    numbers = {item.number for item in loaded.items}, {item.number for item in loaded.held_out}
    assert numbers[0].isdisjoint(numbers[1])
    assert numbers[0] | numbers[1] == set(range(10))


def test_a_run_does_not_go_on_with_other_batches(tmp_path: Path) -> None:
    was = {"batch_size": 8, "counts": [3], "seed": 0}

    check_same(was, {"batch_size": 8, "counts": [3], "seed": 0}, tmp_path)
    with pytest.raises(ConfigError, match=r"batch_size was 8 and is 9; counts was \[3\] and is \[4\]\. Restore that"):
        check_same(was, {"batch_size": 9, "counts": [4], "seed": 0}, tmp_path)


@pytest.mark.parametrize(
    ("pipeline", "changed", "told"),
    [
        ("dpo", {"beta": 0.2}, "beta was 0.1 and is 0.2"),
        ("dpo", {"validation_share": 0.6}, "validation_share was 0.0 and is 0.6"),
        ("sft", {"beta": 0.2}, ""),
    ],
)
def test_what_a_run_minimises_is_part_of_what_it_is(
    tmp_path: Path, pipeline: str, changed: dict[str, Any], told: str
) -> None:
    source = preferences(tmp_path / "d.jsonl") if pipeline == "dpo" else sums(tmp_path / "d.jsonl")

    was, now = (
        loaded_by(offline(tmp_path, pipeline=pipeline, records=[source], **more)).identity for more in ({}, changed)
    )

    if told:
        with pytest.raises(ConfigError, match=told):
            check_same(was, now, tmp_path)
    else:
        check_same(was, now, tmp_path)


def test_a_run_does_not_go_on_with_as_many_other_records(tmp_path: Path) -> None:
    config = offline(tmp_path, pipeline="sft", records=[sums(tmp_path / "d.jsonl")])
    was = loaded_by(config).identity
    text = (tmp_path / "d.jsonl").read_text()
    (tmp_path / "d.jsonl").write_text(text.replace("up", "down", 1))

    with pytest.raises(ConfigError, match=r"trained otherwise: digests was \['\w+'\] and is"):
        check_same(was, loaded_by(config).identity, tmp_path)


def test_other_ranks_hear_of_rank_0_while_a_checkpoint_is_written(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing waits for two pulses here."""
    monkeypatch.setattr(offline_run, "PULSE_SECONDS", 0.01)
    pulses = threading.Semaphore(0)

    class Pulsing(Leader):
        def pulse(self) -> None:
            super().pulse()
            pulses.release()

    class SlowDisk(Checkpoints):
        def complete(self, work: Path, state: CheckpointState) -> Path:
            assert all(pulses.acquire(timeout=20) for _ in range(2))
            return super().complete(work, state)

    root = TrainerRoot(
        run=RunConfig(folder=tmp_path, steps=1),
        model=ModelConfig(path=str(model_path)),
        trainer=offline(tmp_path, pipeline="sft", records=[sums(tmp_path / "d.jsonl")]),
    )
    config = root.trainer.offline
    assert config is not None
    root.run.path.mkdir()
    leader = Pulsing(build_models(root.model, root.trainer), OBJECTIVES)
    run = OfflineRun(
        root,
        config,
        leader,
        pipeline_of(config, leader),
        load_data(root, config),
        Sieve(Renderer(str(model_path)), 0),
        SlowDisk(root.run.path / "checkpoints", run_id="run", keep=1),
        Progress("run", 1, root.run.path / "metrics.jsonl", []),
        asyncio.Event(),
    )

    assert asyncio.run(run.run())
    assert (root.run.path / "checkpoints" / "step-000001" / "state.json").is_file()


# --- supervised ---


def test_the_supervised_loss_is_the_mean_over_all_answered_tokens(model_path: Path) -> None:
    config = offline(model_path, pipeline="sft")
    leader = Leader(build_models(ModelConfig(path=str(model_path)), config), OBJECTIVES)
    batch = rendered(model_path, demonstration, [{"messages": said("ice", "left up")}, {"messages": said("0", "go")}])
    pipeline = Imitation(leader, "supervised")

    held = pipeline.measure(batch)
    measured = pipeline.step(batch, lr=1e-2)
    after = pipeline.measure(batch)

    model = AutoModelForCausalLM.from_pretrained(model_path).double()
    expected = -torch.cat([logp_of(model, row) for (rows,) in batch for row in rows]).mean().item()
    assert measured["tokens"] == held["weight"] == 5
    assert measured["loss"] == pytest.approx(expected, abs=1e-6)
    assert held["nll"] == pytest.approx(expected, abs=1e-6)
    assert after["nll"] < held["nll"]


# --- preferences ---


def test_the_derivative_of_a_preference_is_autograds() -> None:
    torch.manual_seed(0)
    logp_K2 = (torch.randn(7, 2, dtype=torch.float64) * 5).requires_grad_()
    reference_K2 = torch.randn(7, 2, dtype=torch.float64) * 5

    found = dpo(logp_K2.detach(), reference_K2, beta=0.3)

    gap_K2 = logp_K2 - reference_K2
    loss_K = -logsigmoid(0.3 * (gap_K2[:, 0] - gap_K2[:, 1]))
    loss_K.sum().backward()
    assert torch.allclose(found.loss_K, loss_K, rtol=1e-12)
    assert logp_K2.grad is not None
    assert torch.allclose(-found.advantage_K2, logp_K2.grad, rtol=1e-12)


def test_a_preference_that_is_beyond_numbers_has_a_finite_loss() -> None:
    found = dpo(torch.tensor([[-1e5, 0.0]], dtype=torch.float64), torch.zeros(1, 2, dtype=torch.float64), beta=1.0)

    assert found.loss_K.tolist() == [1e5]
    assert found.advantage_K2.tolist() == [[1.0, -1.0]]


def test_a_step_on_preferences_has_the_gradient_of_the_loss_of_whole_answers(model_path: Path, tmp_path: Path) -> None:
    """Against Hugging Face's model in float64, one answer at a time. A pair's two are in different micro-batches."""
    reference = moved(model_path, tmp_path / "reference")
    config = offline(model_path, pipeline="dpo", beta=0.7).model_copy(update={"micro_batch_tokens": 10})
    config = config.model_copy(update={"kl": config.kl.model_copy(update={"reference": str(reference)})})
    models = build_models(ModelConfig(path=str(model_path)), config)
    records = [
        {"prompt": GO, "chosen": "left up down", "rejected": "stop"},
        {"prompt": said("ice", "0", "hole"), "chosen": "1", "rejected": "2 3"},
    ]
    batch = rendered(model_path, preference, records)
    recorded: dict[str, Tensor] = {}
    policy = models.learners[Role.POLICY]
    for name, param in policy.model.named_parameters():  # pyright: ignore[reportAttributeAccessIssue]
        param.register_post_accumulate_grad_hook(lambda p, name=name: recorded.update({name: p.grad.clone()}))

    measured = Preference(Leader(models, OBJECTIVES), 0.7).step(batch, lr=1e-3)

    mine = AutoModelForCausalLM.from_pretrained(model_path).double()
    theirs = AutoModelForCausalLM.from_pretrained(reference).double()
    margins: list[Tensor] = []
    for pair in batch:
        policy_2, reference_2 = (
            torch.stack([torch.cat([logp_of(model, row) for row in rows]).sum() for rows in pair])
            for model in (mine, theirs)
        )
        margins.append(0.7 * ((policy_2 - reference_2)[0] - (policy_2 - reference_2)[1]))
    loss = -logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    found = torch.stack(margins).detach()
    assert measured["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert measured["margin"] == pytest.approx(found.mean().item(), abs=1e-6)
    assert measured["accuracy"] == (found > 0).double().mean().item()
    for name, param in mine.named_parameters():
        assert param.grad is not None
        assert torch.allclose(recorded[name].double(), param.grad, atol=1e-7, rtol=1e-4), name


# --- distillation ---


def test_distilling_brings_the_policy_to_its_teacher(model_path: Path, tmp_path: Path) -> None:
    """The loss is the mean divergence over all answered tokens, and the teacher never learns."""
    teacher = moved(model_path, tmp_path / "teacher")
    config = offline(teacher, pipeline="distillation")
    models = build_models(ModelConfig(path=str(model_path)), config)
    assert config.offline is not None
    batch = rendered(model_path, demonstration, [{"messages": said("ice", "left up")}, {"messages": said("0", "go")}])

    pipeline = pipeline_of(config.offline, Leader(models, OBJECTIVES))
    losses = [pipeline.step(batch, lr=1e-2)["loss"] for _ in range(40)]

    policy, source = (AutoModelForCausalLM.from_pretrained(path).double() for path in (model_path, teacher))
    expected = torch.cat([divergence_of(source, policy, row) for (rows,) in batch for row in rows]).mean()
    assert losses[0] == pytest.approx(expected.item(), abs=1e-6)
    assert losses[-1] < losses[0] / 10
    assert set(models.scorers) == set()


# --- configuration ---


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"offline": {}}, "trainer.offline.records: empty"),
        ({"offline": {"records": [{"source": "no.jsonl"}]}}, "trainer.offline.records.0: no.jsonl: no such file"),
        ({"offline": {"pipeline": "distillation"}}, "needs a teacher"),
        ({"offline": {}, "teacher": {"path": "x"}}, "trainer.teacher: training on records with the pipeline 'sft'"),
        ({"offline": {}, "critic": {}}, "trainer.critic"),
        ({"offline": {}, "keep_best": 1}, "trainer.keep_best"),
        (
            {"offline": {"pipeline": "distillation"}, "teacher": {"path": "x"}, "backend": "megatron"},
            "cuts the vocabulary over ranks",
        ),
    ],
)
def test_settings_that_do_not_agree_are_refused(
    settings: dict[str, Any], problem: str, model_path: Path, tmp_path: Path
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("{}")
    if "trainer.offline.records: empty" not in problem:
        settings["offline"].setdefault("records", [{"source": str(data)}])
    root = TrainerRoot(model=ModelConfig(path=str(model_path)), trainer=TrainerConfig.model_validate(settings))

    with pytest.raises(ConfigError, match=problem):
        root.check()


def test_a_farm_does_not_train_on_records(model_path: Path) -> None:
    config = offline(model_path, pipeline="sft")

    with pytest.raises(ConfigError, match=r"trainer\.offline: .* Say `rollfarm train`"):
        wiring.check(TrainerRoot(model=ModelConfig(path=str(model_path)), trainer=config))
    with pytest.raises(ConfigError, match=r"trainer\.offline: .* Say `rollfarm train`"):
        load_farm([str(ROOT / "examples/offline/sft.toml")])


# --- what the tests share ---


def loaded_by(config: TrainerConfig) -> Data:
    assert config.offline is not None
    return load_data(TrainerRoot(trainer=config), config.offline)


def preferences(path: Path) -> dict[str, str]:
    """The table of a data set."""
    path.write_text("\n".join(json.dumps({"prompt": f"{n}", "chosen": "up", "rejected": "go"}) for n in range(4)))
    return {"source": str(path)}


def rendered(path: Path, read: Callable[..., Item], records: Sequence[dict[str, Any]]) -> list[tuple[list[Row], ...]]:
    renderer = Renderer(str(path))
    return [renderer.rows(read(record, SOURCE, number)) for number, record in enumerate(records)]


def logp_of(model: Any, row: Row) -> Tensor:
    """f64 of each token in the mask, by Hugging Face's own model."""
    ids_T = torch.tensor(row.ids_T, dtype=torch.int64)
    lp_TV = torch.log_softmax(model(input_ids=ids_T[None]).logits[0], dim=-1)
    return lp_TV[:-1].gather(-1, ids_T[1:, None])[:, 0][torch.tensor(row.mask_T[1:])]


def divergence_of(teacher: Any, policy: Any, row: Row) -> Tensor:
    """f64 KL(teacher || policy) before each token in the mask."""
    ids_T = torch.tensor(row.ids_T, dtype=torch.int64)
    lq_TV, lp_TV = (torch.log_softmax(model(input_ids=ids_T[None]).logits[0], dim=-1) for model in (teacher, policy))
    return (lq_TV.exp() * (lq_TV - lp_TV)).sum(-1)[:-1][torch.tensor(row.mask_T[1:])]


def moved(path: Path, to: Path) -> Path:
    """A model like that one, with other weights."""
    model = AutoModelForCausalLM.from_pretrained(path)
    torch.manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(path).save_pretrained(to)
    return to
