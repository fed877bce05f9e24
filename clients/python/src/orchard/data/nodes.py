"""JSON of others, read field by field: a wrong type is an error that names its place."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from orchard.data.errors import DataError, Where

_NAMES = {dict: "an object", list: "an array", str: "a string", bool: "true or false", type(None): "null"}


def kind_of(value: Any) -> str:
    """The JSON type of a value, for people."""
    return next((name for kind, name in _NAMES.items() if isinstance(value, kind)), "a number")


class Node:
    """A JSON value with its place. Fields that are null count as missing."""

    __slots__ = ("value", "where")

    def __init__(self, value: Any, where: Where) -> None:
        self.value = value
        self.where = where

    def fail(self, problem: str, fix: str = "") -> NoReturn:
        """Raise: something is wrong with this value."""
        raise DataError(problem, where=self.where, fix=fix)

    def _typed(self, kind: type | tuple[type, ...], name: str) -> Any:
        if not isinstance(self.value, kind) or (isinstance(self.value, bool) and kind is not bool):
            self.fail(f"must be {name}, not {kind_of(self.value)}")
        return self.value

    def object(self) -> dict[str, Any]:
        """The value as an object."""
        return self._typed(dict, "an object")  # type: ignore[no-any-return]

    def array(self) -> Iterator[Node]:
        """The items of an array."""
        items = self._typed(list, "an array")
        return (Node(item, self.where.at(index)) for index, item in enumerate(items))

    def text(self) -> str:
        """The value as a string."""
        return self._typed(str, "a string")  # type: ignore[no-any-return]

    def number(self) -> float:
        """The value as a number."""
        return float(self._typed((int, float), "a number"))

    def integer(self) -> int:
        """The value as a whole number."""
        return self._typed(int, "a whole number")  # type: ignore[no-any-return]

    def boolean(self) -> bool:
        """The value as true or false."""
        return self._typed(bool, "true or false")  # type: ignore[no-any-return]

    def get(self, key: str) -> Node | None:
        """A field; None if it is missing or null."""
        value = self.object().get(key)
        return None if value is None else Node(value, self.where.at(key))

    def need(self, key: str) -> Node:
        """A field that must be there."""
        found = self.get(key)
        if found is None:
            Node(None, self.where.at(key)).fail("is missing")
        return found

    def text_of(self, key: str, default: str = "") -> str:
        """A string field."""
        found = self.get(key)
        return default if found is None else found.text()

    def integer_of(self, key: str, default: int = 0) -> int:
        """A field that is a whole number."""
        found = self.get(key)
        return default if found is None else found.integer()

    def number_of(self, key: str, default: float = 0.0) -> float:
        """A field that is a number."""
        found = self.get(key)
        return default if found is None else found.number()

    def items_of(self, key: str) -> Iterator[Node]:
        """The items of an array field; none if it is missing."""
        found = self.get(key)
        return iter(()) if found is None else found.array()

    def others(self, known: frozenset[str]) -> dict[str, Any]:
        """Fields of the object that are none of `known`, null ones apart."""
        return {key: value for key, value in self.object().items() if key not in known and value is not None}


def read_document(path: Path) -> Node:
    """A file that is one JSON document.

    Raises:
        DataError: it is no JSON, with the line.
    """
    return Node(_parse(path.read_bytes(), Where(str(path))), Where(str(path)))


def read_lines(path: Path) -> Iterator[Node]:
    """A file with one JSON value on each line; empty lines are passed over.

    Raises:
        DataError: a line is no JSON.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = Where(str(path), number)
                yield Node(_parse(line, where), where)


def _parse(data: bytes, where: Where) -> Any:
    try:
        return json.loads(data, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 at byte {error.start}", where=where) from None
    except json.JSONDecodeError as error:
        line = where.line or error.lineno
        place = Where(where.file, line, where.field)
        # Some of Python's messages end in "at" themselves.
        what = error.msg.removesuffix(" at")
        raise DataError(f"is no JSON: {what} at column {error.colno}", where=place) from None
    except RecursionError:
        raise DataError("is nested too deep", where=where) from None
    except ValueError as error:
        raise DataError(str(error), where=where) from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which is no JSON; write null where there is no number")


def compact(value: Any) -> str:
    """JSON without spaces, with keys in their order."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def parse_object(text: str) -> dict[str, Any]:
    """The object in a field that the store has checked; empty text is the empty object."""
    value = json.loads(text) if text else {}
    return value if isinstance(value, dict) else {}
