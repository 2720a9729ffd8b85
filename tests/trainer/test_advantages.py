"""Advantages: worked out by hand, and against the formulas applied one token at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.trainer import reference
from tests.trainer.reference import Episode
from trainer.algorithms import advantages
from trainer.algorithms.advantages import ADVANTAGES, Advantage
from trainer.algorithms.samples import Samples


def f64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def samples_of(batch: list[Episode]) -> Samples:
    lengths = [length for episode in batch for length in episode.lengths]
    return Samples(
        group_N=torch.tensor([episode.group for episode in batch]),
        reward_N=f64([episode.reward for episode in batch]),
        trajectory_K=torch.tensor([index for index, episode in enumerate(batch) for _ in episode.lengths]),
        step_reward_K=f64([paid for episode in batch for paid in episode.paid]),
        state_K=torch.tensor([_numbered(episode.group, state) for episode in batch for state in episode.states]),
        action_P=torch.tensor([index for index, length in enumerate(lengths) for _ in range(length)]),
        penalty_P=f64([charge for episode in batch for charge in episode.charges]) if batch[0].charges else None,
    )


def _numbered(group: int, state: int) -> int:
    """A number of the group's own for each of its states."""
    return 10 * group + state if state >= 0 else -1


def one_action_each(*groups: list[float]) -> Samples:
    """Trajectories of one action of one token, with these scores."""
    return samples_of(
        [Episode(group, reward, [0.0], [-1], [1]) for group, rewards in enumerate(groups) for reward in rewards]
    )


numbers = st.integers(-8, 8).map(lambda number: number / 4)


@st.composite
def batches(draw: st.DrawFn) -> list[Episode]:
    charged = draw(st.booleans())

    def episode(group: int) -> Episode:
        lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
        actions, tokens = len(lengths), sum(lengths)
        return Episode(
            group,
            draw(numbers),
            draw(st.lists(numbers, min_size=actions, max_size=actions)),
            draw(st.lists(st.integers(-1, 2), min_size=actions, max_size=actions)),
            lengths,
            draw(st.lists(numbers, min_size=tokens, max_size=tokens)) if charged else [],
        )

    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return [episode(group) for group, size in enumerate(sizes) for _ in range(size)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [-1, -1, 1, 1]),
        ("dr_grpo", [-2, -2, 2, 2]),
        ("rloo", [-8 / 3, -8 / 3, 8 / 3, 8 / 3]),
        ("maxrl", [-1, -1, 1, 1]),
        ("raft", [0, 0, 1, 1]),
        ("starpo", [-1, -1, 1, 1]),
    ],
)
def test_a_group_of_two_failures_and_two_successes(name: str, expected: list[float]) -> None:
    assert ADVANTAGES[name](one_action_each([0, 0, 4, 4])).tolist() == pytest.approx(expected)


def test_lite_ppo_divides_by_the_deviation_of_the_whole_batch() -> None:
    # Rewards 0, 2, 4, 6: their deviation is sqrt(5).
    assert advantages.lite_ppo(one_action_each([0, 2], [4, 6])).tolist() == pytest.approx(
        [-(5**-0.5), 5**-0.5, -(5**-0.5), 5**-0.5]
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "lite_ppo", "starpo", "rloo", "maxrl", "gigpo"])
def test_a_group_that_agrees_and_a_lone_member_get_zeros(name: str) -> None:
    assert ADVANTAGES[name](one_action_each([0.1, 0.1, 0.1])).tolist() == [0, 0, 0]
    assert ADVANTAGES[name](one_action_each([0.7])).tolist() == [0]


def test_the_score_is_shared_out_to_actions_and_its_rest_goes_to_the_last() -> None:
    episode = Episode(0, 1.0, [0.5, 0.25], [-1, -1], [2, 1])

    assert advantages.reinforce(samples_of([episode])).tolist() == [1.0, 1.0, 0.5]
    # The first action earned 0.5, the second 0.5, a step of 0.5 later.
    assert advantages.agentic_reinforce(samples_of([episode]), gamma=0.5, mean="none", std="none").tolist() == [
        0.75,
        0.75,
        0.5,
    ]


def test_an_action_without_tokens_is_paid_at_the_last_token_before_it() -> None:
    # Of two trajectories each ends with an action that says nothing; the second begins with one, which no token earned.
    spoke = Episode(0, 1.0, [0.25, 0.0], [-1, -1], [2, 0])
    waited = Episode(0, 3.0, [1.0, 0.5, 0.0], [-1, -1, -1], [0, 1, 0])
    samples = samples_of([spoke, waited])

    assert samples.credit_P().tolist() == [0.0, 1.0, 2.0]
    assert advantages.reinforce(samples).tolist() == [1.0, 1.0, 2.0]
    assert advantages.gae(replace(samples, value_P=f64([0.5, 0.5, 0.5])), lam=0.0).tolist() == [0.0, 0.5, 1.5]


def test_gigpo_compares_actions_that_were_taken_in_the_same_state() -> None:
    won = Episode(0, 1.0, [0.0, 1.0], [5, 6], [1, 1])
    lost = Episode(0, 0.0, [0.0, 0.0], [5, 7], [1, 1])

    found = advantages.gigpo(samples_of([won, lost]), gamma=0.5, std=False)

    # Episode: 1/2 and -1/2. State 5: returns 1/2 and 0, so 1/4 and -1/4; nobody else was in 6 and 7.
    assert found.tolist() == [0.75, 0.5, -0.75, -0.5]


def test_generalised_advantages_sum_discounted_surprises() -> None:
    # Two actions of one token each, the second paid 1; the critic expects 0.5 and then 0.75.
    samples = replace(samples_of([Episode(0, 1.0, [0.0, 1.0], [-1, -1], [1, 1])]), value_P=f64([0.5, 0.75]))

    found = advantages.gae(samples, gamma=0.5, lam=0.5)

    # Surprises: 0 + 0.5 * 0.75 - 0.5 = -0.125, then 1 - 0.75 = 0.25.
    assert found.tolist() == [-0.125 + 0.25 * 0.25, 0.25]


def test_with_lambda_1_the_return_is_what_is_learnt_and_with_lambda_0_the_next_value() -> None:
    value = f64([5.0, 6.0, 7.0])
    samples = replace(samples_of([Episode(0, 2.0, [0.0], [-1], [3])]), value_P=value)

    assert (advantages.gae(samples, lam=1.0) + value).tolist() == [2.0, 2.0, 2.0]
    assert (advantages.gae(samples, lam=0.0) + value).tolist() == [6.0, 7.0, 2.0]


def test_generalised_advantages_end_with_their_trajectory() -> None:
    batch = [Episode(0, 0.0, [0.0], [-1], [2]), Episode(0, 8.0, [0.0], [-1], [1])]
    samples = replace(samples_of(batch), value_P=f64([0.0, 0.0, 4.0]))

    assert advantages.gae(samples).tolist() == [0.0, 0.0, 4.0]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), gamma=st.sampled_from([0.0, 0.5, 1.0]), lam=st.sampled_from([0.0, 0.9, 1.0]))
def test_generalised_advantages_equal_the_formula_on_padded_rows_in_which_others_wrote_too(
    data: st.DataObject, gamma: float, lam: float
) -> None:
    batch = data.draw(batches())
    mask_NT = _placed(batch, data)
    reward_NT, value_NT = np.zeros(mask_NT.shape), np.full(mask_NT.shape, 77.0)
    values = data.draw(st.lists(numbers, min_size=int(mask_NT.sum()), max_size=int(mask_NT.sum())))
    reward_NT[mask_NT] = [credit for episode in batch for credit in episode.token_credits]
    value_NT[mask_NT] = values

    found = advantages.gae(replace(samples_of(batch), value_P=f64(values)), gamma=gamma, lam=lam)

    expected = reference.gae(reward_NT, value_NT, mask_NT, gamma, lam)[mask_NT]
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-9)


def _placed(batch: list[Episode], data: st.DataObject) -> np.ndarray:
    """bool[N, T], where in a padded row the policy wrote each token, with tokens of others between."""
    gaps = st.integers(1, 3)
    rows = [
        [place for length in episode.lengths for place in [False] * data.draw(gaps) + [True] * length]
        for episode in batch
    ]
    width = max(map(len, rows))
    return np.array([row + [False] * (width - len(row)) for row in rows])


def test_distillation_pays_a_token_by_how_much_likelier_the_teacher_finds_it() -> None:
    samples = replace(samples_of([Episode(0, 9.0, [0.0], [-1], [2])]), teacher_gap_P=f64([0.5, -2.0]))

    assert advantages.opd(samples, coef=2.0).tolist() == [1.0, -4.0]


@pytest.mark.parametrize(("name", "who"), [("gae", "a critic"), ("opd", "a teacher")])
def test_an_advantage_without_the_model_that_it_asks_says_so(name: str, who: str) -> None:
    with pytest.raises(LookupError, match=f"needs {who}"):
        ADVANTAGES[name](one_action_each([1.0]))


def test_tokens_are_charged_one_by_one_and_a_trajectory_for_all_of_its_tokens() -> None:
    charged = samples_of([Episode(0, 4.0, [1.0, 3.0], [-1, -1], [2, 1], [0.5, 0.25, 2.0])])

    assert advantages.reinforce(charged).tolist() == [1.25, 1.75, 1.0]
    assert charged.credit_K().tolist() == [0.25, 1.0]
    assert charged.score_N().tolist() == [1.25]


@settings(max_examples=60, deadline=None)
@given(batch=batches(), gamma=st.sampled_from([0.0, 0.5, 1.0]))
def test_every_advantage_equals_its_formula_applied_token_by_token(batch: list[Episode], gamma: float) -> None:
    samples = samples_of(batch)
    expected = {
        "grpo": reference.grpo(batch),
        "starpo": reference.grpo(batch),
        "dr_grpo": reference.dr_grpo(batch),
        "lite_ppo": reference.lite_ppo(batch),
        "rloo": reference.rloo(batch),
        "maxrl": reference.maxrl(batch),
        "raft": reference.raft(batch),
        "reinforce_plus_plus_baseline": reference.reinforce_plus_plus_baseline(batch),
    }
    timed = {
        "reinforce": reference.reinforce(batch, gamma),
        "reinforce_plus_plus": reference.reinforce_plus_plus(batch, gamma),
        "agentic_reinforce": reference.agentic_reinforce(batch, gamma),
        "step_reinforce": reference.step_reinforce(batch, gamma),
        "gigpo": reference.gigpo(batch, gamma, 1.0),
    }
    assert expected.keys() | timed.keys() | {"gae", "opd"} == ADVANTAGES.keys()

    for name, values in expected.items():
        assert ADVANTAGES[name](samples).tolist() == pytest.approx(values, abs=1e-9), name
    for name, values in timed.items():
        in_time: Advantage = lambda samples, /, name=name: getattr(advantages, name)(samples, gamma=gamma)  # noqa: E731
        assert in_time(samples).tolist() == pytest.approx(values, abs=1e-9), name
