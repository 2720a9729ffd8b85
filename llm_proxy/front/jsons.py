"""JSON as it travels: by orjson, and by the standard library for what orjson refuses. Pure."""

import json
from typing import Any

import orjson


def read(text: bytes) -> Any:
    """Raises ValueError and RecursionError. Halves of characters pass, so that the field that holds one can be told."""
    try:
        return orjson.loads(text)
    except ValueError:
        return json.loads(text)


def write(told: Any) -> bytes:
    """Whatever can be read can be written."""
    try:
        return orjson.dumps(told)
    except TypeError:
        return json.dumps(told).encode()


def canonical(told: Any) -> bytes:
    """Equal for equal objects, however their keys are ordered."""
    try:
        return orjson.dumps(told, option=orjson.OPT_SORT_KEYS)
    except TypeError:
        return json.dumps(told, sort_keys=True).encode()
