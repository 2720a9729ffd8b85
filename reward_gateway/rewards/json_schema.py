"""The answer as JSON. Runs in workers alone: a schema's patterns may take for ever."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from reward_gateway.rewards.words import last_block, spoken
from rollfarm.reward import Episode, Score, pure


def _checked(schema: Any) -> Any:
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the JSON schema is wrong: {error.message}") from None
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(_checked)]


@pure
def json_schema(
    episode: Episode, *, against: Schema | Literal["reference"] | None = None, matches: bool = False
) -> Score:
    """1 when the policy's last words are JSON, in a ``` block or as they are, else 0.

    They have to satisfy the schema `against`, if any; "reference" is for a schema of each task's own. With `matches`
    they have to equal the reference as JSON. Raises ValueError when the reference is needed and is not usable.
    """
    wanted = _reference(episode) if matches or against == "reference" else None
    schema = _checked(wanted) if against == "reference" else against
    text = spoken(episode.answer)
    try:
        found = json.loads(last_block(text, "json") or text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        return Score(0.0, f"no JSON: {error}"[:200])
    if matches and not _same(found, wanted):
        return Score(0.0, "not the reference")
    trouble = None if schema is None else _trouble(found, schema)
    return Score(float(trouble is None), trouble or "")


def _reference(episode: Episode) -> Any:
    try:
        return json.loads(episode.reference)
    except ValueError:
        raise ValueError(f"environment {episode.environment!r} gives a reference that is no JSON") from None


def _trouble(found: Any, schema: Any) -> str | None:
    """Why the JSON does not satisfy the schema. Nothing that the schema refers to is fetched."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    validator = validator_for(schema)(schema, registry=Registry())
    try:
        error = next(validator.iter_errors(found), None)
    except (RecursionError, OverflowError) as error:
        return f"too deep or too large: {error}"[:200]
    return None if error is None else error.message[:200]


def _same(one: Any, other: Any) -> bool:
    """As JSON: 1 and 1.0 are equal, true and 1 are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(value, other[name]) for name, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_same(left, right) for left, right in zip(one, other, strict=True))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
