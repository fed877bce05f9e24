"""Texts of models and servers as they can be stored and sent."""

from __future__ import annotations


def plain(text: str) -> str:
    """The text without what neither PostgreSQL nor protobuf takes: NUL and halves of surrogate pairs."""
    return text.replace("\0", "\ufffd").encode(errors="replace").decode()
