"""Whether the answer follows verifiable instructions, as IFEval (arXiv 2311.07911) checks them."""

import json
from collections.abc import Mapping
from itertools import product
from typing import Any

from reward_gateway.rewards.instruction_kinds import KINDS
from reward_gateway.rewards.words import spoken
from rollfarm.config import nearest
from rollfarm.registry import check_settings
from rollfarm.reward import Episode, Score, pure


@pure
def instructions(episode: Episode, *, loose: bool = False, partial: bool = False) -> Score:
    """1 when the policy's last words follow every instruction, else 0; with `partial`, the share that they follow.

    The reference is JSON as in IFEval's data: instruction_id_list, and kwargs with an object for each. `loose` also
    accepts an answer that follows without its first line, its last line, or its asterisks. Raises ValueError for a
    reference that is not usable.
    """
    wanted = _read(episode.reference)
    variants = _variants(spoken(episode.answer)) if loose else [spoken(episode.answer)]
    missed = [name for name, arguments in wanted if not any(_follows(name, arguments, text) for text in variants)]
    share = 1 - len(missed) / len(wanted)
    return Score(share if partial else float(not missed), f"missed {', '.join(missed)}" if missed else "")


def _read(reference: str) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        read = json.loads(reference)
        names, given = read["instruction_id_list"], read["kwargs"]
        wanted = [(str(name), dict(arguments)) for name, arguments in zip(names, given, strict=True)]
    except (ValueError, KeyError, TypeError):
        raise ValueError("the reference is no JSON with instruction_id_list and as many kwargs") from None
    if not wanted:
        raise ValueError("the reference has no instructions")
    return [(name, _arguments(name, arguments)) for name, arguments in wanted]


def _arguments(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the published data leaves open is null."""
    if name not in KINDS:
        raise ValueError(f"unknown instruction {name!r}.{nearest(name, list(KINDS))}")
    given = {argument: value for argument, value in arguments.items() if value is not None}
    return check_settings(KINDS[name], given, owner=f"instruction {name}")


def _follows(name: str, arguments: Mapping[str, Any], text: str) -> bool:
    return bool(text.strip()) and KINDS[name](text, **arguments)


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cuts = product((0, 1), (len(lines), -1))
    cut = ["\n".join(lines[first:last]).strip() for first, last in cuts]
    return [variant for shorter in cut for variant in (shorter, shorter.replace("*", ""))]
