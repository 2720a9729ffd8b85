"""Each kind of IFEval, with an answer that follows and one that does not."""

import json
from typing import Any

import pytest

from reward_gateway.rewards.instruction_kinds import KINDS, count_sentences
from reward_gateway.rewards.instructions import instructions
from rollfarm.reward import Episode, Turn

GERMAN = "Der schnelle braune Fuchs springt über den faulen Hund, und niemand weiß warum das so ist."
ENGLISH = "The quick brown fox jumps over the lazy dog and nobody knows why that should be so."

CASES: list[tuple[str, dict[str, Any], str, str]] = [
    ("keywords:existence", {"keywords": ["cat", "Dog"]}, "A dog and a cat", "A dog"),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "at least"}, "No, no.", "No."),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, "relation": "less than"}, "No.", "No, no."),
    ("keywords:forbidden_words", {"forbidden_words": ["cat"]}, "A category", "A Cat"),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 2, "let_relation": "at least"}, "Anna", "an"),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "One, two"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\ntwo\n***\nthree"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "two words", "now three words"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "then"},
        'First this.\n\n"Then, that.',
        "First this.\n\nAnd then that.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] of [city]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye\nP. S. more", "Bye\nPS more... corps"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye\nP.P.S more", "Bye\nP.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:constrained_response", {}, "My answer is no.", "No."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<joy>>\nIt is.", "<< >>\nIt is."),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why?"}, "why? Because.", "Because. Why?"),
    ("startend:end_checker", {"end_phrase": "The end."}, 'So. "the end."', "The end. Really."),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "I am NOT amused",
        "I am not",
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), GERMAN.lower()),
    ("punctuation:no_comma", {}, "one two", "one, two"),
    ("startend:quotation", {}, '"all of it"', '"some" of it'),
]


def asked(answer: str, *wanted: tuple[str, dict[str, Any]]) -> Episode:
    reference = {"instruction_id_list": [name for name, _ in wanted], "kwargs": [given for _, given in wanted]}
    return Episode(turns=[Turn("policy", answer)], reference=json.dumps(reference))


def test_every_kind_of_the_paper_has_a_case():
    assert {name for name, *_ in CASES} == set(KINDS)
    assert len(KINDS) == 25


@pytest.mark.parametrize(("name", "given", "followed", "missed"), CASES, ids=[name for name, *_ in CASES])
def test_a_kind_is_told_apart(name, given, followed, missed):
    assert instructions(asked(followed, (name, given))).value == 1.0
    assert instructions(asked(missed, (name, given))).value == 0.0


COMMA = ("punctuation:no_comma", {})
QUOTED = ("startend:quotation", {})


def test_all_have_to_be_followed_or_their_share_counts():
    episode = asked("no comma here", COMMA, QUOTED)

    assert instructions(episode).value == 0.0
    assert instructions(episode, partial=True).value == 0.5
    assert instructions(episode).detail == "missed startend:quotation"


def test_the_same_kind_may_be_asked_twice():
    twice = [("keywords:existence", {"keywords": [word]}) for word in ("cat", "dog")]

    assert instructions(asked("a cat", *twice), partial=True).value == 0.5


def test_loose_forgives_a_first_line_a_last_line_and_asterisks():
    for answer in ('Sure, here:\n"all of it"', '"all of it"\nHope that helps', '**"all of it"**'):
        assert instructions(asked(answer, QUOTED)).value == 0.0
        assert instructions(asked(answer, QUOTED), loose=True).value == 1.0


def test_an_empty_answer_follows_nothing():
    assert instructions(asked(" ", COMMA), loose=True).value == 0.0


def test_arguments_that_the_data_leaves_open_do_not_matter():
    assert instructions(asked("a", ("punctuation:no_comma", {"keywords": None}))).value == 1.0


@pytest.mark.parametrize(
    ("reference", "cause"),
    [
        ("", "is no JSON with instruction_id_list"),
        ('{"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}', "as many kwargs"),
        ('{"instruction_id_list": [], "kwargs": []}', "has no instructions"),
        ('{"instruction_id_list": ["no_comma"], "kwargs": [{}]}', "unknown instruction 'no_comma'"),
    ],
)
def test_a_reference_that_is_not_usable_is_a_failure(reference, cause):
    with pytest.raises(ValueError, match=cause):
        instructions(Episode(turns=[Turn("policy", "a")], reference=reference))


def test_arguments_that_are_wrong_are_a_failure():
    with pytest.raises(Exception, match="num_bullets: Field required"):
        instructions(asked("a", ("detectable_format:number_bullet_lists", {})))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("One. Two! Three?", 3),
        ("Dr. Smith came. He left.", 2),
        ('"Really?" she said. Yes', 3),
        ("It costs 3.50 now", 1),
        ("Wait... what?!", 2),
        ("", 0),
        ("...", 0),
    ],
)
def test_sentences_are_counted(text, count):
    assert count_sentences(text) == count


def test_a_megabyte_of_exclamation_marks_is_counted_in_no_time():
    assert count_sentences("!" * 2**20 + "x") == 1
