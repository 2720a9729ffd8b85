"""The 25 kinds of verifiable instructions of IFEval (arXiv 2311.07911), by their names there.

Each is a function of the answer whose keyword parameters are the instruction's arguments, named as in the published
data.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

Relation = Literal["less than", "at least"]
Check = Callable[..., bool]

_LETTER = re.compile(r"[^\W\d_]")
_ABBREVIATION = re.compile(r"\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|[a-z])\.$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"(?<![.!?。！？])[.!?。！？]+[\"'”’)\]]*(?=\s|$)")


def existence(answer: str, *, keywords: Sequence[str]) -> bool:
    """Every keyword is there."""
    return all(word.lower() in answer.lower() for word in keywords)


def frequency(answer: str, *, keyword: str, frequency: int, relation: Relation) -> bool:
    """A keyword is there so often."""
    return _holds(answer.lower().count(keyword.lower()), relation, frequency)


def forbidden_words(answer: str, *, forbidden_words: Sequence[str]) -> bool:
    """None of the words is there."""
    return not any(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(answer: str, *, letter: str, let_frequency: int, let_relation: Relation) -> bool:
    """A letter is there so often."""
    return _holds(answer.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(answer: str, *, language: str) -> bool:
    """It is in this language, an ISO 639-1 code. A text without any language is in every one."""
    return _language(answer) in (language, None)


def number_sentences(answer: str, *, num_sentences: int, relation: Relation) -> bool:
    """So many sentences."""
    return _holds(count_sentences(answer), relation, num_sentences)


def number_paragraphs(answer: str, *, num_paragraphs: int) -> bool:
    """So many paragraphs, with *** between them."""
    parts = [part.strip() for part in answer.split("***")]
    return all(parts[1:-1]) and len(list(filter(None, parts))) == num_paragraphs


def number_words(answer: str, *, num_words: int, relation: Relation) -> bool:
    """So many words."""
    return _holds(len(re.findall(r"\w+", answer)), relation, num_words)


def nth_paragraph_first_word(answer: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """So many paragraphs, with empty lines between them, of which one begins with this word."""
    parts = [part.strip() for part in answer.split("\n\n")]
    paragraphs = list(filter(None, parts))
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    word = paragraphs[nth_paragraph - 1].split()[0].lstrip("'\"")
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def number_placeholders(answer: str, *, num_placeholders: int) -> bool:
    """At least so many placeholders, such as [address]."""
    return len(re.findall(r"\[[^\[\]\n]*\]", answer)) >= num_placeholders


def postscript(answer: str, *, postscript_marker: str) -> bool:
    """A postscript with this marker, such as P.S."""
    letters = [re.escape(letter) for letter in postscript_marker.lower() if letter not in ". "]
    dotted = r"\.\s?".join(letters) if "." in postscript_marker else re.escape(postscript_marker.lower())
    return re.search(rf"(?<!\w){dotted}", answer.lower()) is not None


def number_bullet_lists(answer: str, *, num_bullets: int) -> bool:
    """Exactly so many bullet points, with * or -."""
    lines = [line.lstrip() for line in answer.splitlines()]
    return sum(line[:1] == "-" or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines) == num_bullets


def constrained_response(answer: str) -> bool:
    """One of three sentences."""
    return any(f"My answer is {word}." in answer for word in ("yes", "no", "maybe"))


def number_highlighted_sections(answer: str, *, num_highlights: int) -> bool:
    """At least so many highlights, such as *this* or **this**."""
    highlights = re.findall(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*", answer)
    return sum(bool(highlight.strip("* ")) for highlight in highlights) >= num_highlights


def multiple_sections(answer: str, *, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections, each headed by the word and a number, such as Section 1."""
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", answer)) >= num_sections


def json_format(answer: str) -> bool:
    """All of it is JSON, perhaps in a ``` block."""
    text = answer.strip()
    head, _, body = text.partition("\n")
    if head.strip().lower() in ("```", "```json"):
        text = body.removesuffix("```")
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def title(answer: str) -> bool:
    """A title in double angular brackets, such as <<joy>>."""
    return any(found.strip("<> \t") for found in re.findall(r"<<[^\n<>]+>>", answer))


def two_responses(answer: str) -> bool:
    """Two different responses with ****** between them."""
    parts = [part.strip() for part in answer.split("******")]
    responses = list(filter(None, parts))
    return all(parts[1:-1]) and len(responses) == 2 and responses[0] != responses[1]


def repeat_prompt(answer: str, *, prompt_to_repeat: str) -> bool:
    """The prompt comes first."""
    return answer.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(answer: str, *, end_phrase: str) -> bool:
    """The phrase comes last."""
    return answer.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(answer: str, *, capital_frequency: int, capital_relation: Relation) -> bool:
    """So many words in capitals alone."""
    words = re.findall(r"\w[\w'’-]*", answer)
    return _holds(sum(word.isupper() for word in words), capital_relation, capital_frequency)


def english_capital(answer: str) -> bool:
    """English, in capitals alone."""
    return answer.isupper() and _language(answer.lower()) in ("en", None)


def english_lowercase(answer: str) -> bool:
    """English, in lower case alone."""
    return answer.islower() and _language(answer) in ("en", None)


def no_comma(answer: str) -> bool:
    """No comma."""
    return "," not in answer


def quotation(answer: str) -> bool:
    """All of it in double quotation marks."""
    text = answer.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


KINDS: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
    "startend:quotation": quotation,
}


def count_sentences(text: str) -> int:
    """Runs of words that end with a full stop, a question mark or an exclamation mark, or with the text."""
    count, begin = 0, 0
    for found in _SENTENCE_END.finditer(text):
        sentence = text[begin : found.end()]
        if _ABBREVIATION.search(sentence[-10:]) and found.end() < len(text):
            continue
        count += _LETTER.search(sentence) is not None or any(character.isdigit() for character in sentence)
        begin = found.end()
    return count + (_LETTER.search(text, begin) is not None)


def _holds(count: int, relation: Relation, bound: int) -> bool:
    if relation not in ("less than", "at least"):
        raise ValueError(f"relation {relation!r} is neither 'less than' nor 'at least'")
    return count < bound if relation == "less than" else count >= bound


def _language(text: str) -> str | None:
    """The ISO 639-1 code, always the same for a text; None for a text without any language."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return detect(text)
    except LangDetectException:
        return None
