"""Quotas on the wire, and their field rules."""

from __future__ import annotations

import math

from orchard.admin.v1 import admin_pb2

from services.common.quota import Quota
from services.common.times import duration_of_ms, ms_of_duration
from services.common.validation import DAY_SECONDS, Fields


def check(quota: admin_pb2.Quota, field: str, fields: Fields) -> None:
    """Note every broken rule of admin.proto."""
    for name, least, most in (
        ("sandboxes", 0, 1_000_000),
        ("cpu", 0, 1_000_000),
        ("memory_bytes", 0, 1 << 60),
        ("creates_per_second", 0.001, 100_000),
    ):
        if quota.HasField(name):  # type: ignore[arg-type]
            value = getattr(quota, name)
            finite = fields.check(math.isfinite(value), f"{field}.{name}", "must be a number")
            if finite:
                fields.between(f"{field}.{name}", value, least, most, zero=False)
    if quota.HasField("maximum_lifetime"):
        fields.duration(f"{field}.maximum_lifetime", quota.maximum_lifetime, minimum=1, maximum=365 * DAY_SECONDS)


def to_proto(quota: Quota) -> admin_pb2.Quota:
    """The message."""
    message = admin_pb2.Quota(
        sandboxes=quota.sandboxes,
        cpu=quota.cpu,
        memory_bytes=quota.memory_bytes,
        creates_per_second=quota.creates_per_second,
    )
    if quota.maximum_lifetime_ms is not None:
        message.maximum_lifetime.CopyFrom(duration_of_ms(quota.maximum_lifetime_ms))
    return message


def from_proto(message: admin_pb2.Quota, revision: int) -> Quota:
    """The value."""
    return Quota(
        revision=revision,
        sandboxes=message.sandboxes if message.HasField("sandboxes") else None,
        cpu=message.cpu if message.HasField("cpu") else None,
        memory_bytes=message.memory_bytes if message.HasField("memory_bytes") else None,
        creates_per_second=message.creates_per_second if message.HasField("creates_per_second") else None,
        maximum_lifetime_ms=ms_of_duration(message.maximum_lifetime) if message.HasField("maximum_lifetime") else None,
    )
