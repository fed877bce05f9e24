"""An id that stands twice in what is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from orchard.data.errors import DataError, Where
from orchard.data.record import Record
from orchard.data.sources import hash_of


def without_repeats(records: Iterable[Record]) -> Iterator[Record]:
    """The same, as long as no two that differ have one id: of these the platform would keep but the first.

    Raises, while it is iterated:
        DataError: two have; the error names the place of both.
    """
    seen: dict[str, tuple[str, Where]] = {}
    for record in records:
        # Half a hash: it is held for each, and nobody makes files to deceive themselves.
        digest = hash_of(record)[:32]
        before, where = seen.setdefault(record.id, (digest, record.where))
        if before != digest:
            raise DataError(
                f"the id {record.id!r} is that of another trajectory, at {where}",
                where=record.where,
                fix="give each its own",
            )
        yield record
