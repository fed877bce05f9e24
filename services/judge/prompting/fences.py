"""Agent text in a prompt is data. It stands within a fence that it can neither close nor open.

Two things hold it there, each enough alone: the fence has a random word that was drawn after the text was written, and
every line of the text begins with a mark, so that none can be a line of the fence, whatever letters it is made of.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable
from typing import Final

LINE_MARK: Final = "| "
_BREAKS: Final = re.compile("\r\n|[\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
# What is plainly shown. All else may have to be written out: it is looked at one by one, and rare.
_PLAIN: Final = bytes((*b"\n\t", *range(0x20, 0x7F)))
_UNUSUAL: Final = re.compile(r"[^\n\t\x20-\x7e]")


def draw_word(texts: Iterable[str], draw: Callable[[], str] = lambda: secrets.token_hex(8)) -> str:
    """A random word that is in none of the texts."""
    written = tuple(texts)
    while True:
        word = draw()
        if not any(word in text for text in written):
            return word


def neutralised(text: str) -> str:
    """The text with one kind of line break, and everything that cannot be seen written out.

    Control characters, marks of writing direction, zero-width characters, private and unassigned ones become escapes:
    what a judge reads is what a person would see.
    """
    # In a tenth of the time that a pattern takes.
    if text.isascii() and not text.encode().translate(None, _PLAIN):
        return text
    text = _BREAKS.sub("\n", text)
    return _UNUSUAL.sub(lambda found: found[0] if _is_shown(found[0]) else _escape(found[0]), text)


def fenced(label: str, text: str, word: str) -> str:
    """The text within a fence."""
    lines = neutralised(text).replace("\n", f"\n{LINE_MARK}")
    return f"<<<{label} {word}>>>\n{LINE_MARK}{lines}\n<<<end {label} {word}>>>"


def _is_shown(character: str) -> bool:
    return unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def _escape(character: str) -> str:
    point = ord(character)
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{{{point:x}}}"
