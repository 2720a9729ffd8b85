"""Rewards that read the policy's words, by hand."""

import json
import re
import time

import pytest
from pydantic import ValidationError

from reward_gateway.rewards.choice import choice, chosen
from reward_gateway.rewards.exact import exact
from reward_gateway.rewards.json_schema import json_schema
from reward_gateway.rewards.length import overlong, relative_length
from reward_gateway.rewards.qa import qa
from reward_gateway.rewards.rank import rank
from reward_gateway.rewards.regex import regex
from reward_gateway.rewards.tags import tags
from reward_gateway.rewards.words import boxed, final, last_block, spoken
from reward_gateway.scoring import plan
from rollfarm.config import ConfigError
from rollfarm.registry import settings_model
from rollfarm.reward import Episode, Turn
from tests.reward_gateway.support import config

MEGABYTE = 1_000_000


def said(answer: str, reference: str = "", *, truncated: bool = False, paid: float | None = None) -> Episode:
    turns = [Turn("environment", "question"), Turn("policy", answer, paid)]
    return Episode(turns=turns, reference=reference, truncated=truncated)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("It is <answer> Paris </answer>.", "Paris"),
        ("<answer>Rome</answer> no: <answer>Paris</answer>", "Paris"),
        ("so \\boxed{\\frac{1}{2}} holds", "\\frac{1}{2}"),
        ("The answer is Paris.\nBye", "Paris."),
        ("Final answer: 42", "42"),
        ("Paris", "Paris"),
        ("<think>the answer is Rome</think>Paris", "Paris"),
        ("\\boxed{never closed", "\\boxed{never closed"),
        ("", ""),
    ],
)
def test_the_final_answer_is_what_the_text_ends_with(text, answer):
    assert final(text) == answer


def test_words_are_found_in_a_megabyte_in_no_time():
    hostile = ["answer " * (MEGABYTE // 7), "\\boxed{" * (MEGABYTE // 7), "<answer>" * (MEGABYTE // 8), "{" * MEGABYTE]

    for text in hostile:
        assert final(text) is not None
        assert chosen(text) is None
        assert boxed(text) is None
        assert spoken(text) == text


def test_an_answer_that_is_announced_and_never_comes_is_looked_for_in_no_time():
    began = time.process_time()

    assert final("The answer is:" + "\n" * 19_000) == ":"
    assert final("The answer is:" + "\n" * 19_000 + "42") == "42"

    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b"),
        ("```\nx\n```", "x"),
        ("```bash\nls\n```", None),
        ("```python\nnever closed", None),
        ("x = 1", None),
    ],
)
def test_the_last_block_of_a_language_is_taken(text, block):
    assert last_block(text, "python", "py") == block


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The answer is (B)", "B"),
        ("the answer is B.", "B"),
        ("Answer: **C**", "C"),
        ("The correct answer is option D", "D"),
        ("\\boxed{B}", "B"),
        ("$\\boxed{\\text{B}}$", "B"),
        ("<answer>b</answer>", "B"),
        ("B", "B"),
        ("(b)", "B"),
        ("B) Paris", "B"),
        ("**B**", "B"),
        ("I weighed A and C.\nB.", "B"),
        ("The answer is A. No, wait: the answer is B", "B"),
        ("<think>The answer is A</think>C", "C"),
        ("The answer is an apple", None),
        ("Apples grow on trees", None),
        ("A or B, who knows", None),
        ("I think so", None),
        ("", None),
    ],
)
def test_a_choice_is_read_as_people_write_it(answer, letter):
    assert chosen(answer) == letter


def test_a_choice_counts_against_the_letter_of_the_reference():
    assert choice(said("The answer is (B)", "B) Paris")).value == 1.0
    assert choice(said("The answer is (B)", "C")).value == 0.0
    assert choice(said("no idea", "C")).detail == "no choice in the answer"
    with pytest.raises(ValueError, match="is no letter of a choice"):
        choice(said("B", "Paris"))


def test_thoughts_are_no_part_of_an_exact_answer():
    assert exact(said("<think>Rome?</think>\nParis.", "Paris")) == 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "value"),
    [
        ("The answer is: the Eiffel Tower!", "Eiffel tower", 1.0),
        ("tall Eiffel tower", "Eiffel tower", 0.8),  # precision 2/3, recall 1
        ("a tower", "Eiffel tower", 2 / 3),  # precision 1, recall 1/2; "a" is an article
        ("Rome", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("", "The", 0.0),
        ("NYC", '["New York City", "NYC"]', 1.0),
    ],
)
def test_answers_in_words_share_words(answer, reference, value):
    assert qa(said(answer, reference)) == pytest.approx(value)


def test_answers_in_words_may_have_to_be_exact():
    assert qa(said("The Eiffel tower.", "eiffel tower"), metric="exact") == 1.0
    assert qa(said("tall Eiffel tower", "eiffel tower"), metric="exact") == 0.0


@pytest.mark.parametrize("reference", ["", " ", "[]", "[1]"])
def test_answers_in_words_without_a_reference_are_a_failure(reference):
    with pytest.raises(ValueError, match="gives no reference"):
        qa(said("Paris", reference))


def test_a_pattern_is_found_or_matches_all():
    pattern = re.compile(r"\d+ apples")

    assert regex(said("I have 12 apples."), pattern=pattern) == 1.0
    assert regex(said("I have 12 apples."), pattern=pattern, whole=True) == 0.0
    assert regex(said("12 apples\n"), pattern=pattern, whole=True) == 1.0


def test_a_wrong_pattern_or_schema_is_refused_when_the_configuration_is_read():
    with pytest.raises(ConfigError, match="pattern: Input should be a valid regular expression"):
        plan(config({"name": "regex", "settings": {"pattern": "("}}))
    with pytest.raises(ConfigError, match=r"the JSON schema is wrong: 'whole' is not valid"):
        plan(config({"name": "json_schema", "settings": {"against": {"type": "whole"}}}))


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ('{"n": 1}', 1.0),
        ('Here:\n```json\n{"n": 1}\n```\nDone', 1.0),
        ('{"n": "1"}', 0.0),
        ("{}", 0.0),
        ("{'n': 1}", 0.0),
        ('{"n": NaN}', 0.0),
        ("no JSON", 0.0),
        ("[" * MEGABYTE, 0.0),
    ],
)
def test_json_has_to_satisfy_the_schema(answer, value):
    assert json_schema(said(answer), against=NUMBER).value == value


def test_a_number_too_large_for_the_schema_is_0():
    assert json_schema(said("1" + "0" * 400), against={"multipleOf": 0.5}).value == 0.0


def test_json_may_have_to_be_no_more_than_json():
    assert json_schema(said("[1, 2]")).value == 1.0
    assert json_schema(said("[1, 2")).value == 0.0


def test_a_schema_may_be_each_tasks_own():
    assert json_schema(said('{"n": 1}', json.dumps(NUMBER)), against="reference").value == 1.0
    with pytest.raises(ValueError, match="a reference that is no JSON"):
        json_schema(said("{}", "{"), against="reference")
    with pytest.raises(ValueError, match="the JSON schema is wrong"):
        json_schema(said("{}", '{"type": 5}'), against="reference")


@pytest.mark.parametrize(
    ("answer", "value"),
    [('{"b": [1.0, true], "a": null}', 1.0), ('{"a": null, "b": [1, 1]}', 0.0), ('{"a": null}', 0.0), ("[]", 0.0)],
)
def test_json_may_have_to_equal_the_reference(answer, value):
    assert json_schema(said(answer, '{"a": null, "b": [1, true]}'), matches=True).value == value


def test_a_schema_fetches_nothing():
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema(said("{}"), against={"$ref": "http://127.0.0.1:9/schema.json"})


@pytest.mark.parametrize(
    ("answer", "value", "value_alone"),
    [
        ("<think>a</think><answer>b</answer>", 1.0, 1.0),
        ("<think>a</think> so <answer>b</answer>", 1.0, 0.0),
        (" <think>a</think>\n<answer>b</answer>\n", 1.0, 1.0),
        ("<answer>b</answer><think>a</think>", 0.0, 0.0),
        ("<think><answer>b</answer></think>", 0.0, 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0, 0.0),
        ("<think>a</think><answer>b", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_tags_are_there_once_and_in_order(answer, value, value_alone):
    assert tags(said(answer)) == value
    assert tags(said(answer), only=True) == value_alone


@pytest.mark.parametrize(
    ("length", "value"), [(0, 0.0), (80, 0.0), (85, -0.25), (90, -0.5), (100, -1.0), (101, -1.0), (10_000, -1.0)]
)
def test_dapos_punishment_falls_over_the_buffer(length, value):
    assert overlong(said("x" * length), most=100, buffer=20) == value


def test_an_episode_that_was_cut_short_is_too_long_by_any_measure():
    assert overlong(said("x", truncated=True), most=100, buffer=20) == -1.0


def test_length_may_be_counted_in_words_and_over_all_turns():
    episode = Episode(turns=[Turn("policy", "one two"), Turn("environment", "x " * 50), Turn("policy", "three")])

    assert overlong(episode, most=4, buffer=2, unit="words") == -0.5


def test_a_length_that_punishes_nothing_is_refused():
    with pytest.raises(ValidationError):
        settings_model(overlong)(most=10, buffer=0)


def test_the_shortest_sibling_gets_a_half_and_the_longest_minus_a_half():
    siblings = [said("x" * length) for length in (10, 30, 15)]

    assert relative_length(siblings) == [0.5, -0.5, 0.25]
    assert relative_length([said("ab"), said("cd")]) == [0.0, 0.0]


def test_ranks_are_the_share_of_siblings_that_were_paid_less():
    siblings = [said("", paid=paid) for paid in (0.1, 7.0, 0.1, -3.0)]

    assert rank(siblings) == [0.5, 1.0, 0.5, 0.0]
