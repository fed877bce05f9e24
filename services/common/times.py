"""Times on the wire are Timestamps and Durations; inside the services they are whole milliseconds, 0 for unset."""

from __future__ import annotations

import time

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def to_timestamp(milliseconds: int) -> Timestamp | None:
    """A Timestamp, or None for 0."""
    if not milliseconds:
        return None
    return Timestamp(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def to_ms(timestamp: Timestamp) -> int:
    """Milliseconds since 1970 of a Timestamp; 0 if it is unset."""
    return timestamp.seconds * 1000 + timestamp.nanos // 1_000_000


def duration_of_ms(milliseconds: int) -> Duration:
    """A Duration."""
    return Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)


def ms_of_duration(duration: Duration) -> int:
    """Milliseconds of a Duration, rounded down."""
    return duration.seconds * 1000 + duration.nanos // 1_000_000
