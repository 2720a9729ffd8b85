"""What of a policy's words is its answer. Everything here is linear in the length of the text."""

import re

_MOST = 20_000
"""Characters at the end of the text in which an answer is looked for."""

_PHRASE = re.compile(r"answer(?:\s+is|\s*:)\s*:?\s*(.+)", re.IGNORECASE)


def spoken(text: str) -> str:
    """The text after the policy's thoughts: after the last </think>, or all of it where there is none."""
    return text.rpartition("</think>")[2]


def tagged(text: str, tag: str = "answer") -> str | None:
    """What the last <tag>...</tag> holds; None where there is none."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.strip() if closed and opened else None


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces balanced; None where there is none."""
    _, found, rest = text.rpartition("\\boxed{")
    depth = 1
    for place, character in enumerate(rest if found else ""):
        depth += (character == "{") - (character == "}")
        if not depth:
            return rest[:place].strip()
    return None


def final(text: str) -> str:
    """The answer that the text ends with.

    It is in <answer>, else in \\boxed{}, else after "answer is" or "answer:" to the end of that line, else all of it.
    """
    text = spoken(text)[-_MOST:].strip()
    for found in (tagged(text), boxed(text)):
        if found is not None:
            return found
    phrases = _PHRASE.findall(text)
    return phrases[-1].strip() if phrases else text


def last_block(text: str, *languages: str) -> str | None:
    """What the last ``` block holds that is in one of the languages, else in none; None where there is no such block.

    Without languages any block counts.
    """
    blocks = _blocks(text)
    wanted = [body for language, body in blocks if not languages or language in languages]
    return next(reversed(wanted or [body for language, body in blocks if not language]), None)


def _blocks(text: str) -> list[tuple[str, str]]:
    """Every closed ``` block, in order: its language in lower case, and its lines."""
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        mark = line.strip()
        if not mark.startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = mark[3:].strip().lower(), []
        elif mark == "```":
            blocks.append((language, "\n".join(lines)))
            language = None
        else:
            lines.append(line)
    return blocks
