"""Reads the JSON of a request field by field. What is wrong is refused with the field's name; null is absent. Pure."""

from collections.abc import Collection, Iterator
from typing import Any

from llm_proxy.front import jsons
from rollfarm.errors import InvalidArgument


class Fields:
    """One object of the request."""

    __slots__ = ("_above", "_name", "table")

    def __init__(self, table: dict[str, Any], name: str = "", above: "Fields | None" = None) -> None:
        """`name` is what the object is called in the one above it."""
        self.table = table
        self._name = name
        self._above = above

    @classmethod
    def parse(cls, body: bytes) -> "Fields":
        """The request's body. Raises InvalidArgument."""
        try:
            table = jsons.read(body)
        except (ValueError, RecursionError):
            raise InvalidArgument("The body is not valid JSON.") from None
        if not isinstance(table, dict):
            raise InvalidArgument("The body is not a JSON object.")
        return cls(table)

    def path(self, name: str) -> str:
        return name if self._above is None else f"{self._above.path(self._name)}.{name}"

    def text(self, name: str, default: str | None = None) -> str:
        """A string; without a default it has to be there."""
        value = self.table.get(name)
        if isinstance(value, str):
            return value
        if value is None and default is not None:
            return default
        raise self.wrong(name, "a string")

    def flag(self, name: str) -> bool:
        value = self.table.get(name)
        return False if value is None else self._checked(name, value, bool, "true or false")

    def integer(self, name: str, least: int, most: int = 2**31 - 1) -> int | None:
        value = self.table.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(name, "an integer")
        if not least <= value <= most:
            raise self.wrong(name, f"between {least} and {most}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        value = self.table.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        if not least <= value <= most:
            raise self.wrong(name, f"between {least:g} and {most:g}")
        return float(value)

    def strings(self, name: str) -> tuple[str, ...]:
        """A string or several; none where it is absent."""
        value = self.table.get(name)
        values: list[Any] = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            raise self.wrong(name, "a string or a list of strings")
        return tuple(values)

    def inner(self, name: str) -> "Fields | None":
        """An object within this one."""
        value = self.table.get(name)
        if value is None:
            return None
        return Fields(self._checked(name, value, dict, "an object"), name, self)

    def items(self, name: str) -> Iterator["Fields"]:
        """The objects of a list; none where it is absent."""
        value = self.table.get(name)
        for index, item in enumerate([] if value is None else self._checked(name, value, list, "a list")):
            if not isinstance(item, dict):
                raise self.wrong(f"{name}.{index}", "an object")
            yield Fields(item, f"{name}.{index}", self)

    def accept(self, known: Collection[str], neutral: dict[str, Any]) -> None:
        """Refuse what is not known, unless it says what goes without saying."""
        for name, value in self.table.items():
            if name in known or value is None or (name in neutral and value == neutral[name]):
                continue
            raise InvalidArgument(f"{self.path(name)} is not supported.", field=self.path(name))

    def wrong(self, name: str, expected: str) -> InvalidArgument:
        """The error that a field is not what it has to be."""
        where = self.path(name)
        problem = f"{where} is missing; it" if self.table.get(name.split(".")[0]) is None else where
        return InvalidArgument(f"{problem} must be {expected}.", field=where)

    def _checked(self, name: str, value: Any, kind: type[Any], expected: str) -> Any:
        if not isinstance(value, kind):
            raise self.wrong(name, expected)
        return value
