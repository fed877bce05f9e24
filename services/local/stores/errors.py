"""What can be wrong with an embedded store."""

from __future__ import annotations


class StoreError(Exception):
    """A store cannot be made or started; the message says why and what to do."""
