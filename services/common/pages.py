"""Page tokens: opaque to clients, checked when they come back."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from services.common.errors import InvalidArgumentError


def encode_token(position: tuple[Any, ...]) -> str:
    """A token that stands for a position in a list."""
    return base64.urlsafe_b64encode(json.dumps(position, separators=(",", ":")).encode()).decode().rstrip("=")


def decode_token(field: str, token: str, types: tuple[type, ...]) -> Any:
    """The position that a token stands for: a tuple of values of these types.

    Raises:
        InvalidArgumentError: it is not a token that `encode_token` made.
    """
    try:
        position = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    except (ValueError, binascii.Error):
        position = None
    if not isinstance(position, list) or [type(part) for part in position] != list(types):
        raise bad_token(field)
    return tuple(position)


def bad_token(field: str) -> InvalidArgumentError:
    """The error for what `encode_token` did not make."""
    return InvalidArgumentError.of(field, "is not a token of an earlier page; leave it empty to begin again")
