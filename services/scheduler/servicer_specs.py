"""SandboxSpec at the edge: field rules, defaults, hash, and what the scheduler reads of it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from google.protobuf.duration_pb2 import Duration
from orchard.sandbox.v1 import sandbox_pb2

from services.common.times import duration_of_ms, ms_of_duration
from services.common.validation import DAY_SECONDS, MEBIBYTE, Fields, span
from services.scheduler.records import Terms

_TTL_SECONDS: Final = 86_400
_START_SECONDS: Final = 60
_PULL_SECONDS: Final = 900
_SHM_BYTES: Final = 64 * MEBIBYTE
_PIDS: Final = 4096
_MONTH_SECONDS: Final = 30 * DAY_SECONDS
_TEBIBYTE: Final = 1 << 40


def check(spec: sandbox_pb2.SandboxSpec, fields: Fields) -> None:
    """Note every broken rule of sandbox.proto."""
    fields.text("spec.image", spec.image, maximum=512)
    fields.env("spec.env", spec.env)
    fields.labels("spec.labels", spec.labels)
    _check_resources(spec.resources, fields)
    listed = spec.network.mode == sandbox_pb2.NETWORK_MODE_ALLOW_LIST
    fields.check(
        spec.network.mode in sandbox_pb2.NetworkMode.values(), "spec.network.mode", "is not a known network mode"
    )
    fields.check(
        bool(spec.network.allow_list) == listed,
        "spec.network.allow_list",
        "goes with NETWORK_MODE_ALLOW_LIST, which needs it",
    )
    fields.text("spec.network.allow_list", spec.network.allow_list, maximum=63)
    for name, least, most in (
        ("ttl", 1.0, _MONTH_SECONDS),
        ("idle_timeout", 1.0, _MONTH_SECONDS),
        ("heartbeat_timeout", 5.0, DAY_SECONDS),
        ("start_timeout", 1.0, 3600.0),
        ("pull_timeout", 1.0, 21_600.0),
    ):
        value: Duration = getattr(spec, name)
        always = name in ("ttl", "start_timeout", "pull_timeout")
        if spec.HasField(name) and (always or value.seconds or value.nanos):  # type: ignore[arg-type]
            fields.duration(f"spec.{name}", value, minimum=least, maximum=most)
    fields.text("spec.working_directory", spec.working_directory, maximum=4096)
    fields.check(
        not spec.working_directory or spec.working_directory.startswith("/"),
        "spec.working_directory",
        "must be absolute",
    )
    fields.text("spec.user", spec.user, maximum=256)
    fields.between("spec.priority", spec.priority, -1000, 1000)
    if spec.start_argv:
        fields.arguments("spec.start_argv", spec.start_argv)
    # Which of these names there are, the runtime knows.
    fields.text("spec.image_pull_secret", spec.image_pull_secret, maximum=253)
    fields.text("spec.runtime_class", spec.runtime_class, maximum=253)
    fields.check(len(spec.node_selector) <= 16, "spec.node_selector", "must have at most 16 labels")


def _check_resources(resources: sandbox_pb2.Resources, fields: Fields) -> None:
    fields.between("spec.resources.cpu", resources.cpu, 0.1, 256)
    fields.between("spec.resources.memory_bytes", resources.memory_bytes, 16 * MEBIBYTE, 4 * _TEBIBYTE)
    fields.between("spec.resources.disk_bytes", resources.disk_bytes, 16 * MEBIBYTE, 64 * _TEBIBYTE)
    fields.between("spec.resources.shm_bytes", resources.shm_bytes, 64 << 10, _TEBIBYTE)
    fields.between("spec.resources.pids", resources.pids, 16, 4_194_304)
    fields.between("spec.resources.gpu", resources.gpu, 0, 64)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a runtime gives where a spec says nothing; 0: no limit."""

    cpu: float = 0.0
    memory_bytes: int = 0
    disk_bytes: int = 0


def check_lifetime(spec: sandbox_pb2.SandboxSpec, lifetime_ms: int, fields: Fields) -> None:
    """Note a time to live beyond the longest life; 0: there is none."""
    fields.check(
        not lifetime_ms or ms_of_duration(spec.ttl) <= lifetime_ms,
        "spec.ttl",
        f"must be at most {span(lifetime_ms / 1000)}: longer no sandbox of this tenant may live",
    )


def admitted(spec: sandbox_pb2.SandboxSpec, defaults: Defaults, lifetime_ms: int) -> sandbox_pb2.SandboxSpec:
    """A copy with the defaults filled in."""
    full = sandbox_pb2.SandboxSpec()
    full.CopyFrom(spec)
    if not full.HasField("ttl"):
        full.ttl.CopyFrom(duration_of_ms(min(_TTL_SECONDS * 1000, lifetime_ms or _TTL_SECONDS * 1000)))
    full.resources.cpu = full.resources.cpu or defaults.cpu
    full.resources.memory_bytes = full.resources.memory_bytes or defaults.memory_bytes
    full.resources.disk_bytes = full.resources.disk_bytes or defaults.disk_bytes
    if not full.HasField("start_timeout"):
        full.start_timeout.seconds = _START_SECONDS
    if not full.HasField("pull_timeout"):
        full.pull_timeout.seconds = _PULL_SECONDS
    if not full.network.mode:
        full.network.mode = sandbox_pb2.NETWORK_MODE_NONE
    full.resources.shm_bytes = full.resources.shm_bytes or _SHM_BYTES
    full.resources.pids = full.resources.pids or _PIDS
    return full


def spec_hash(sandbox_id: str, spec: sandbox_pb2.SandboxSpec, *, expects_secret_env: bool) -> str:
    """What a repeat under the same request id must match: what was asked for, whatever the defaults are by then."""
    asked = spec.SerializeToString(deterministic=True)
    return hashlib.sha256(f"{sandbox_id}\0{expects_secret_env}\0".encode() + asked).hexdigest()


def terms_of(spec: bytes) -> Terms:
    """See service.TermsOf."""
    parsed = sandbox_pb2.SandboxSpec.FromString(spec)
    return Terms(
        ttl_ms=ms_of_duration(parsed.ttl) or _TTL_SECONDS * 1000,
        idle_timeout_ms=ms_of_duration(parsed.idle_timeout),
        heartbeat_timeout_ms=ms_of_duration(parsed.heartbeat_timeout),
        start_timeout_ms=ms_of_duration(parsed.start_timeout) or _START_SECONDS * 1000,
        priority=parsed.priority,
        cpu_milli=math.ceil(parsed.resources.cpu * 1000),
        memory_bytes=parsed.resources.memory_bytes,
    )


def labels_of(spec: bytes) -> Mapping[str, str]:
    """The labels of a serialised spec."""
    return sandbox_pb2.SandboxSpec.FromString(spec).labels
