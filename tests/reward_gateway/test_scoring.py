import math
import tomllib
from pathlib import Path

import pytest

from reward_gateway.config import RewardGatewayConfig
from reward_gateway.rewards import REWARDS
from reward_gateway.rewards.environment import environment
from reward_gateway.rewards.exact import exact
from reward_gateway.rewards.maths import maths
from reward_gateway.scoring import Here, InWorker, Share, combine, plan, shares_of
from rollfarm.config import ConfigError
from rollfarm.errors import RewardFailed, UnknownDomain
from rollfarm.registry import settings_model
from rollfarm.reward import Episode, Score, Turn, is_pure, read_episode, read_score
from tests.reward_gateway.support import OWN, config, episode


def said(answer: str, reference: str) -> Episode:
    return Episode(turns=[Turn("environment", "question"), Turn("policy", answer)], reference=reference)


def test_the_environments_reward_is_the_sum_of_its_steps():
    turns = [Turn("policy", "a", 0.5), Turn("environment", "b"), Turn("policy", "c", -0.2), Turn("policy", "d")]

    assert environment(Episode(turns=turns)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("Paris", "paris", 1.0),
        ("  new   york. ", "New York", 1.0),
        ("Paris, I think", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("3.5", "3.5", 1.0),
    ],
)
def test_exact_compares_words_and_not_space(answer, reference, value):
    assert exact(said(answer, reference)) == value


def test_exact_looks_at_the_last_words_alone_and_at_case_when_asked():
    episode = Episode(
        turns=[Turn("policy", "Paris"), Turn("policy", "Rome"), Turn("environment", "end")], reference="rome"
    )

    assert exact(episode) == 1.0
    assert exact(episode, case_sensitive=True) == 0.0


def test_exact_without_a_reference_is_a_failure_and_not_a_zero():
    with pytest.raises(ValueError, match="gives no reference"):
        exact(said("Paris", " "))


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("So the answer is $\\frac{1}{2}$.", "0.5", 1.0),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
        ("7", "7", 1.0),
        ("it is 8", "7", 0.0),
        ("no idea", "7", 0.0),
    ],
)
def test_maths_compares_meaning(answer, reference, value):
    assert maths(said(answer, reference)).value == value


def test_maths_without_mathematics_in_the_reference_is_a_failure():
    with pytest.raises(ValueError, match="holds no mathematical expression"):
        maths(said("7", ""))


def test_values_are_weighted_and_their_parts_kept():
    shares = [Share("exact", 1.0, InWorker("exact", {})), Share("brevity", -0.5, InWorker("brevity", {}))]

    response = combine(shares, [Score(1.0), Score(0.4, "long")])

    assert response.reward == pytest.approx(0.8)
    assert [(part.name, part.value, part.weight, part.detail) for part in response.parts] == [
        ("exact", 1.0, 1.0, ""),
        ("brevity", 0.4, -0.5, "long"),
    ]


def test_a_sum_that_overflows_is_a_failure():
    shares = [Share("a", 1e308, InWorker("a", {}))]

    with pytest.raises(RewardFailed, match="weighted sum"):
        combine(shares, [Score(1e308)])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_failure_and_never_zero(value):
    with pytest.raises(RewardFailed, match="not a finite number"):
        read_score("mine", value)


@pytest.mark.parametrize("returned", ["1.0", None, [1.0], 1j, Score("x"), Score(10**400)])  # pyright: ignore[reportArgumentType]
def test_a_value_that_is_not_a_number_is_a_failure(returned):
    with pytest.raises(RewardFailed, match="not a number"):
        read_score("mine", returned)


@pytest.mark.parametrize("detail", [None, 5, "\ud800"])
def test_a_detail_that_cannot_be_sent_is_a_failure(detail):
    with pytest.raises(RewardFailed, match="Reward mine: the score's detail"):
        read_score("mine", Score(1.0, detail))


def test_true_is_one():
    assert read_score("mine", True) == Score(1.0)


def test_an_unknown_domain_lists_the_known_ones():
    with pytest.raises(UnknownDomain, match=r"'e'.*Known: d\."):
        shares_of(plan(config({"name": "exact"})), "e")


def test_a_plan_knows_who_computes_each_reward():
    shares = plan(config({"name": "exact"}, {"name": "maths"}, {"name": f"{OWN}:length"}, {"name": f"{OWN}:patient"}))

    assert [type(share.where) for share in shares["d"]] == [Here, InWorker, InWorker, Here]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"name": "exat"}, "Did you mean 'exact'\\? Known: choice, code, environment, exact, "),
        (
            {"name": "exact", "settings": {"case_sensible": 1}},
            "unknown setting 'case_sensible'. Did you mean 'case_sensitive'",
        ),
        ({"name": "maths", "settings": {"digits": "many"}}, "digits: Input should be a valid integer"),
        ({"name": "nowhere.at_all:x"}, "cannot be imported"),
        ({"name": f"{OWN}:lenght"}, "cannot be imported"),
    ],
)
def test_a_wrong_reward_is_refused_when_the_configuration_is_read(reward, message):
    with pytest.raises(ConfigError, match=message):
        plan(config(reward))


def test_an_external_reward_takes_no_settings_here():
    with pytest.raises(ConfigError, match="takes no settings"):
        plan(config({"name": "judge", "settings": {"x": 1}}, external={"judge": {"address": "127.0.0.1:1"}}))


def test_an_episode_reaches_a_reward_function_whole():
    packed = episode("one", "two", reference="two", steps=(0.5,))
    packed.task.settings_json = '{"size": 3}'
    packed.metrics["success"] = 1.0

    read = read_episode(packed)

    assert [(turn.author, turn.text, turn.step_reward) for turn in read.turns] == [
        ("policy", "one", 0.5),
        ("policy", "two", None),
    ]
    assert (read.answer, read.reference, read.domain, read.environment) == ("two", "two", "d", "quiz")
    assert (read.settings, read.metrics, read.truncated) == ({"size": 3}, {"success": 1.0}, False)


def test_every_built_in_reward_says_what_it_does():
    assert all(reward.__doc__ for reward in REWARDS.values())


def test_the_documented_run_of_several_domains_is_one():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    example = tomllib.loads(page.split("```toml")[-1].split("```")[0])

    shares = plan(RewardGatewayConfig.model_validate(example["reward_gateway"]))

    assert list(shares) == ["maths", "programming", "following", "facts", "chat"]


def test_scores_that_are_remembered_are_those_of_functions_of_the_episode_that_take_time():
    slow = {"code", "instructions", "json_schema", "maths", "reasoning_gym", "regex"}

    assert {name for name, function in REWARDS.items() if is_pure(function)} == slow


def test_every_built_in_reward_and_each_of_its_settings_is_documented():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}

    assert set(REWARDS) <= set(rows)
    inherited = {"judge_pairs", "judge_reference"}  # "the same" as judge
    for name in set(REWARDS) - inherited:
        assert all(f"`{setting}`" in rows[name] for setting in settings_model(REWARDS[name]).model_fields), name
