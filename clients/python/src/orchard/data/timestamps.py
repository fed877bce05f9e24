"""Moments between text and protobuf."""

from __future__ import annotations

import datetime as dt
import re

from google.protobuf.timestamp_pb2 import Timestamp

_FRACTION = re.compile(r"(\.\d{1,9})\d*")


def parse_time(text: str) -> tuple[Timestamp, bool]:
    """A moment from ISO 8601 text, and whether it said its time zone; one that does not is taken as UTC.

    Raises:
        ValueError: it is no moment.
    """
    nanos = 0
    if fraction := _FRACTION.search(text):
        nanos = int(fraction[1][1:].ljust(9, "0"))
        text = text[: fraction.start()] + text[fraction.end() :]
    moment = dt.datetime.fromisoformat(text)
    zoned = moment.tzinfo is not None
    seconds = (moment if zoned else moment.replace(tzinfo=dt.UTC)).timestamp()
    return Timestamp(seconds=int(seconds), nanos=nanos), zoned


def time_of(seconds: float) -> Timestamp:
    """A moment from seconds since 1970."""
    whole, nanos = divmod(round(seconds * 1_000_000_000), 1_000_000_000)
    return Timestamp(seconds=whole, nanos=nanos)


def show_time(moment: Timestamp) -> str:
    """ISO 8601 in UTC, to the nanosecond where it has any."""
    return moment.ToJsonString()
