"""Finding the one JSON object that is the answer, in whatever a judge wrote. Nothing is guessed."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final

MOST_CHARACTERS: Final = 1 << 20
_MOST_CANDIDATES: Final = 256


class AnswerError(Exception):
    """The text has no answer that could be read.

    Attributes:
        ambiguous: it has several.
        cut_off: it ends in the middle of one.
    """

    def __init__(self, message: str, *, ambiguous: bool = False, cut_off: bool = False) -> None:
        super().__init__(message)
        self.ambiguous = ambiguous
        self.cut_off = cut_off


class _NotAnAnswerError(ValueError):
    """JSON in a form that this reader refuses: a key twice, or a number that is none."""


def find_answer(text: str, ticket: str) -> dict[str, Any]:
    """The JSON object that bears the ticket.

    The whole text should be that object. A judge that cannot be held to a schema may fence it, or write before and
    after it: of the objects that stand in the text side by side exactly one must bear the ticket. One that was only
    repeated from the material does not have it.

    Raises:
        AnswerError: there is none, there are several that differ, or one was refused.
    """
    if len(text) > MOST_CHARACTERS:
        raise AnswerError(f"the answer has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    found: list[dict[str, Any]] = []
    position, tries = text.find("{"), 0
    while position >= 0 and tries < _MOST_CANDIDATES:
        tries += 1
        try:
            # First anything that is JSON: what does not bear the ticket is nobody's answer, whatever is wrong with it.
            value, end = _ANY.raw_decode(text, position)
            if value.get("ticket") == ticket:
                value = _EXACT.raw_decode(text, position)[0]
                if value not in found:
                    found.append(value)
        except _NotAnAnswerError as error:
            raise AnswerError(str(error)) from None
        except (ValueError, RecursionError):
            if position == text.find("{") and ticket in text and _is_cut_off(text[position:]):
                raise AnswerError("the answer ends in the middle of its JSON", cut_off=True) from None
            position = text.find("{", position + 1)
            continue
        position = text.find("{", end)
    if not found:
        raise AnswerError("the answer has no JSON object that bears the ticket")
    if len(found) > 1:
        raise AnswerError("the answer has several verdicts that differ", ambiguous=True)
    return found[0]


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, _value in pairs if sum(key == other for other, _ in pairs) > 1)
        raise _NotAnAnswerError(f"the answer has the key {twice[:80]!r} twice")
    return value


def _constant(constant: str) -> Any:
    raise _NotAnAnswerError(f"the answer has {constant}, which is no number")


def _integer(digits: str) -> int:
    if len(digits) > 20:
        raise _NotAnAnswerError("the answer has a number of more than 20 digits")
    return int(digits)


def _is_cut_off(text: str) -> bool:
    """Whether a text that begins with a brace ends before its braces close."""
    depth, quoted, escaped = 0, False, False
    for character in text:
        if quoted:
            quoted = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            quoted = True
        elif character in "{[":
            depth += 1
        elif character in "}]":
            depth -= 1
            if not depth:
                return False
    return True


_ANY: Final = json.JSONDecoder(parse_int=str)
_EXACT: Final = json.JSONDecoder(
    object_pairs_hook=_pairs, parse_constant=_constant, parse_float=Decimal, parse_int=_integer
)
