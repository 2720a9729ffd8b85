"""The real reasoning-gym, which takes seconds to import."""

import json
import re
from pathlib import Path

import pytest

from rollfarm import reasoning
from rollfarm.errors import RewardFailed
from tests.reward_gateway.support import config, episode, scoring


@pytest.mark.slow
async def test_a_dataset_scores_the_final_answer():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("basic_arithmetic", seed=1, size=1)[0]
    reference = json.dumps(entry)
    async with scoring(config({"name": "reasoning_gym"})) as score:
        right = await score(episode(f"I think so. <answer>{entry['answer']}</answer>", reference=reference))
        wrong = await score(episode("The answer is unknown", reference=reference))
        with pytest.raises(RewardFailed, match="is no entry of a reasoning-gym dataset"):
            await score(episode("4", reference="4"))

    assert right.reward == 1.0
    assert wrong.reward < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("dataset", sorted(reasoning.RUN_ANSWERS))
def test_no_answer_is_run_as_a_program(dataset: str, tmp_path: Path):
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset(dataset, seed=1, size=1)[0]
    scorer, proof = gym.get_score_answer_fn(dataset), tmp_path / "proof"
    program = f"__import__('os').system('touch {proof}')"

    assert reasoning.score(scorer, program, entry) == reasoning.score(scorer, f"[{program}]", entry) == 0.0
    assert not proof.exists()
    assert reasoning.score(scorer, str(entry["answer"]), entry) == 1.0


@pytest.mark.slow
def test_the_data_sets_that_run_answers_are_those_that_are_known():
    gym = pytest.importorskip("reasoning_gym")
    runs = re.compile(r"(?:\beval|\bparse_expr)\(answer\b")

    found = {path.stem for path in Path(gym.__file__).parent.rglob("*.py") if runs.search(path.read_text())}

    assert found == reasoning.RUN_ANSWERS


@pytest.mark.slow
def test_an_answer_at_which_a_scorer_raises_is_0_and_a_broken_entry_is_a_failure():
    gym = pytest.importorskip("reasoning_gym")
    entry = gym.create_dataset("prime_factorization", seed=1, size=1)[0]
    scorer = gym.get_score_answer_fn("prime_factorization")

    assert reasoning.score(scorer, "no idea", entry) == 0.0
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning.score(scorer, "2", {**entry, "answer": "no idea"} | {"metadata": {"source_dataset": "x"}})


@pytest.mark.parametrize(
    "answer", ["(3 + 4)*2 - 5!", "x**2/2 + sin(2*x) - log(x) + C", "[['_', 'Q'], ['Q', '_']]", "A B", ""]
)
def test_formulas_tables_and_words_are_plain(answer: str):
    assert reasoning.is_plain(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "exit()",
        "exec ('x')",
        "S('exec'+'+('[1]+')')",
        "sin('x')",
        "x.__class__",
        "[exec][0](x)",
        "(lambda: 1)(2)",
        "{1: 2}",
        "ｅｘｅｃ(1)",
        "exec\n(1)",
    ],
)
def test_what_calls_or_reaches_for_attributes_is_not_plain(answer: str):
    assert not reasoning.is_plain(answer)
