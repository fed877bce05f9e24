"""YAML as plain values, with the line of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchard.data.errors import DataError, MissingExtraError, Where

Path_ = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A file.

    Attributes:
        value: what it says.
        lines: of each value, by its path; of a key, the key's.
        file: its path.
    """

    value: Any
    lines: Mapping[Path_, int]
    file: str

    def where(self, path: Sequence[str | int]) -> Where:
        """The place of a value; of one that is missing, that of what should have it."""
        known = tuple(path)
        while known and known not in self.lines:
            known = known[:-1]
        where = Where(self.file, self.lines.get(known, 1))
        for key in path:
            where = where.at(key)
        return where


def read_yaml(path: Path) -> Document:
    """Read a file.

    Raises:
        MissingExtraError: PyYAML is not installed.
        DataError: it is no YAML, or has a key twice.
    """
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("a plan file", "PyYAML", "data") from None
    try:
        text = path.read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        lines: dict[Path_, int] = {}
        if node is not None:
            _walk(node, (), lines, str(path))
        value = yaml.safe_load(text)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=Where(str(path)), fix="check the path") from None
    except UnicodeDecodeError:
        raise DataError("is not UTF-8", where=Where(str(path)), fix="save it as UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        where = Where(str(path), mark.line + 1 if mark else 0)
        raise DataError(f"is no YAML: {problem}", where=where, fix="mind the indentation and the colons") from None
    return Document(value, lines, str(path))


def _walk(node: Any, path: Path_, lines: dict[Path_, int], file: str) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if node.id == "mapping":
        for key, value in node.value:
            inner = (*path, str(key.value))
            if inner in lines:
                where = Where(file, key.start_mark.line + 1, str(key.value))
                raise DataError(f"is there twice, first in line {lines[inner]}", where=where, fix="keep one of them")
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines, file)
    elif node.id == "sequence":
        for index, item in enumerate(node.value):
            _walk(item, (*path, index), lines, file)
