"""Field rules: the one place that builds BadRequest. The rules themselves stand in the proto comments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from services.common.errors import InvalidArgumentError, Violation

_SANDBOX_ID: Final = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_TENANT: Final = re.compile(r"[a-z][a-z0-9-]{0,62}\Z")
_TOKEN_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_ENV_KEY: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_LABEL: Final = re.compile(r"[A-Za-z0-9_./-]{1,63}\Z")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9_./-]{0,63}\Z")
RESERVED_SANDBOX_IDS: Final = frozenset({"all", "self", "default"})
MEBIBYTE: Final = 1 << 20
ARGUMENT_LIMIT: Final = (128 << 10) - 1
"""Bytes of one argument or KEY=VALUE that the kernel accepts; its limit of 128 KiB counts the final NUL."""
ARGUMENTS_LIMIT: Final = MEBIBYTE + (64 << 10)
"""Bytes of all arguments: 1 MiB, with room for a program, its options and every NUL."""
DAY_SECONDS: Final = 86_400.0
_YEAR_1: Final = -62_135_596_800
_YEAR_9999: Final = 253_402_300_799


class DurationLike(Protocol):
    """A google.protobuf.Duration."""

    seconds: int
    nanos: int


class TimestampLike(Protocol):
    """A google.protobuf.Timestamp."""

    seconds: int
    nanos: int


def span(seconds: float) -> str:
    """A duration for people: "0.001 s", "90 s", "30 days"."""
    days = seconds / DAY_SECONDS
    if days >= 2 and days.is_integer():
        return f"{days:,.0f} days"
    return f"{seconds:g} s" if seconds < 100_000 else f"{seconds:,.0f} s"


def seconds_of(duration: DurationLike) -> float:
    """Seconds of a protobuf Duration."""
    return duration.seconds + duration.nanos / 1e9


class Fields:
    """Collects every violation of a request, then raises them together.

    fields = Fields()
    fields.sandbox_id("sandbox_id", request.sandbox_id)
    fields.check(request.page_size >= 0, "page_size", "must not be negative")
    fields.done()
    """

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    def check(self, holds: bool, field: str, description: str) -> bool:
        """Note a violation unless the rule holds; returns whether it does."""
        if not holds:
            self._violations.append(Violation(field, description))
        return holds

    def done(self) -> None:
        """Raise InvalidArgumentError if anything was noted."""
        if self._violations:
            raise InvalidArgumentError(self._violations)

    def sandbox_id(self, field: str, value: str, *, optional: bool = False) -> bool:
        """Sandbox.sandbox_id; whether it is one."""
        if optional and not value:
            return True
        return (
            self.check(bool(value), field, "is required")
            and self.check(
                _SANDBOX_ID.match(value) is not None,
                field,
                "must be 1 to 63 of a-z, 0-9 and '-', begin with a letter and end with a letter or digit",
            )
            and self.check(value not in RESERVED_SANDBOX_IDS, field, f"{value!r} is reserved; choose another id")
        )

    def token_id(self, field: str, value: str, *, optional: bool = False) -> None:
        """An exec id or request id: 1 to 64 of A-Z, a-z, 0-9, '-', '_'."""
        if optional and not value:
            return
        if self.check(bool(value), field, "is required"):
            self.check(_TOKEN_ID.match(value) is not None, field, "must be 1 to 64 of A-Z, a-z, 0-9, '-' and '_'")

    def tenant(self, field: str, value: str) -> None:
        """A tenant's name: 1 to 63 of a-z, 0-9 and '-', beginning with a letter."""
        self.check(
            _TENANT.match(value) is not None, field, "must be 1 to 63 of a-z, 0-9 and '-', beginning with a letter"
        )

    def text(self, field: str, value: str, *, maximum: int, required: bool = False) -> None:
        """A string of at most `maximum` bytes without NUL."""
        if required:
            self.check(bool(value), field, "is required")
        self.check(len(value.encode()) <= maximum, field, f"must be at most {maximum} bytes")
        self.check("\0" not in value, field, "must not contain a NUL")

    def env(self, field: str, env: Mapping[str, str]) -> None:
        """An environment: key syntax, no NUL, at most 1,000 entries, 1 MiB in all and what the kernel takes of each."""
        self.check(len(env) <= 1000, field, "must have at most 1,000 entries")
        size = 0
        for key, value in env.items():
            entry = len(key) + 1 + len(value.encode())
            size += entry + 1
            shown = key if len(key) <= 80 else key[:80] + "..."
            self._kernel_string(f"{field}[{shown!r}]", entry)
            self.check(
                _ENV_KEY.match(key) is not None, f"{field}[{shown!r}]", "the key must match [A-Za-z_][A-Za-z0-9_]*"
            )
            self.check("\0" not in value, f"{field}[{shown!r}]", "the value must not contain a NUL")
        self.check(size <= MEBIBYTE, field, "must be at most 1 MiB in all")

    def arguments(self, field: str, arguments: Sequence[str]) -> None:
        """A program and its arguments: 1 to 65,536, no NUL, 1,088 KiB in all and what the kernel takes of each."""
        if not self.check(1 <= len(arguments) <= 65_536, field, "must have 1 to 65,536 elements"):
            return
        self.check(bool(arguments[0]), f"{field}[0]", "is the program and must not be empty")
        total = 0
        for index, argument in enumerate(arguments):
            size = len(argument.encode())
            total += size + 1
            if size > ARGUMENT_LIMIT:
                self._kernel_string(f"{field}[{index}]", size)
            if "\0" in argument:
                self.check(False, f"{field}[{index}]", "must not contain a NUL")
        self.check(total <= ARGUMENTS_LIMIT, field, "must be at most 1,088 KiB in all")

    def _kernel_string(self, field: str, size: int) -> None:
        self.check(
            size <= ARGUMENT_LIMIT,
            field,
            f"has {size:,} bytes; the kernel takes at most 128 KiB: pass it on stdin or as a file",
        )

    def labels(self, field: str, labels: Mapping[str, str]) -> None:
        """Labels: at most 64, keys and values of at most 63 safe characters."""
        self.check(len(labels) <= 64, field, "must have at most 64 labels")
        for key, value in labels.items():
            self.check(
                _LABEL.match(key) is not None and _LABEL_VALUE.match(value) is not None,
                f"{field}[{key[:80]!r}]",
                "keys and values must be at most 63 of A-Z, a-z, 0-9, '-', '_', '.', '/'",
            )

    def duration(self, field: str, value: DurationLike, *, minimum: float, maximum: float) -> None:
        """A duration within [minimum, maximum] seconds."""
        seconds = seconds_of(value)
        self.check(minimum <= seconds <= maximum, field, f"must be from {span(minimum)} to {span(maximum)}")

    def timestamp(self, field: str, value: TimestampLike) -> bool:
        """A time of the years 1 to 9999; returns whether it is one."""
        return self.check(
            _YEAR_1 <= value.seconds <= _YEAR_9999 and 0 <= value.nanos < 1_000_000_000,
            field,
            "must be a time of the years 1 to 9999",
        )

    def between(self, field: str, value: float, minimum: float, maximum: float, *, zero: bool = True) -> None:
        """A number within [minimum, maximum]; zero means the default where allowed."""
        if zero and value == 0:
            return
        self.check(minimum <= value <= maximum, field, f"must be from {minimum:,} to {maximum:,}")

    def path(self, field: str, value: str) -> None:
        """A path: 1 to 4,096 bytes without NUL."""
        self.text(field, value, maximum=4096, required=True)

    def page_size(self, field: str, value: int, *, default: int, maximum: int) -> int:
        """A page size; returns the one to use."""
        self.check(0 <= value <= maximum, field, f"must be from 1 to {maximum:,}, or 0 for the default of {default}")
        return value or default
