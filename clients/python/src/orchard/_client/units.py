"""Sizes and durations as people write them."""

from __future__ import annotations

import datetime as dt
import math
import re
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2

from orchard._client.errors import InvalidArgument

_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*\Z", re.IGNORECASE)
_SIZE_UNITS: Final = {
    "": 1,
    "b": 1,
    **{f"{letter}{end}": 1024**power for power, letter in enumerate("kmgt", 1) for end in ("ib", "i")},
    **{f"{letter}{end}": 1000**power for power, letter in enumerate("kmgt", 1) for end in ("b", "")},
}
_TIME: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", re.IGNORECASE)
_TIME_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Beyond what a protobuf Duration holds; the platform's own limits are far below.
_MAXIMUM_SECONDS: Final = 315_576_000_000.0
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

Seconds = float | dt.timedelta
"""A duration: a number of seconds or a timedelta."""


def parse_size(field: str, value: int | str | None) -> int:
    """Bytes of 1073741824, "1GiB", "1g" (decimal: 1e9) or "512 MiB"; None is 0, the platform's default.

    Raises:
        InvalidArgument: it is no size.
    """
    if value is None:
        return 0
    if isinstance(value, str):
        match = _SIZE.match(value)
        unit = _SIZE_UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise InvalidArgument.of(
                field, f'{value!r} is no size; write bytes as a number, or like "512MiB" or "2GiB"'
            )
        return int(float(match[1]) * unit)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise InvalidArgument.of(field, f"{value!r} is no size; it must be a whole number of bytes, not negative")
    return value


def parse_time(field: str, text: str) -> float:
    """Seconds of "90", "1.5h", "2h30m" or "500ms".

    Raises:
        InvalidArgument: it is no duration.
    """
    stripped = text.strip()
    try:
        return float(stripped)
    except ValueError:
        pass
    if not stripped or _TIME.sub("", stripped).strip():
        raise InvalidArgument.of(field, f'{text!r} is no duration; write seconds, or like "90s", "10m" or "2h30m"')
    return sum(float(number) * _TIME_UNITS[unit.lower()] for number, unit in _TIME.findall(stripped))


def seconds_of(field: str, value: Seconds) -> float:
    """Seconds of a number or timedelta.

    Raises:
        InvalidArgument: it is no finite number, or negative.
    """
    if isinstance(value, dt.timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument.of(field, f"{value!r} is no duration; give seconds or a timedelta")
    if not math.isfinite(value) or value < 0:
        raise InvalidArgument.of(field, f"{value!r} must be a finite number of seconds that is not negative")
    if value > _MAXIMUM_SECONDS:
        raise InvalidArgument.of(field, f"{value!r} must be at most {_MAXIMUM_SECONDS:,.0f} seconds")
    return float(value)


def duration(field: str, value: Seconds) -> duration_pb2.Duration:
    """A protobuf Duration of seconds or a timedelta."""
    seconds, nanos = divmod(round(seconds_of(field, value) * 1e9), 1_000_000_000)
    return duration_pb2.Duration(seconds=seconds, nanos=nanos)


def duration_seconds(value: duration_pb2.Duration) -> float:
    """Seconds of a protobuf Duration."""
    return value.seconds + value.nanos / 1e9


def timestamp(value: dt.datetime) -> timestamp_pb2.Timestamp:
    """A protobuf Timestamp; a datetime without a zone is local time."""
    result = timestamp_pb2.Timestamp()
    result.FromDatetime(value.astimezone(dt.UTC))
    return result


def datetime_of(value: timestamp_pb2.Timestamp) -> dt.datetime:
    """An aware datetime in UTC."""
    return _EPOCH + dt.timedelta(0, value.seconds, value.nanos // 1000)
