"""Protobuf messages to values."""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf import timestamp_pb2
from google.protobuf.message import Message

from orchard._client import types
from orchard._client.units import datetime_of, duration_seconds
from orchard.admin.v1 import admin_pb2
from orchard.exec.v1 import exec_pb2, file_pb2
from orchard.sandbox.v1 import sandbox_pb2

E = TypeVar("E", bound=enum.StrEnum)


def time_of(message: Message, field: str) -> dt.datetime | None:
    """A timestamp of a message; None where it is not set."""
    if not message.HasField(field):
        return None
    value: timestamp_pb2.Timestamp = getattr(message, field)
    return datetime_of(value)


def _name(enumeration: Any, number: int, prefix: str) -> str:
    """The bare UPPER_SNAKE name of an enum's value; a number that this SDK does not know yet as UNKNOWN_<number>."""
    if number == 0:
        return ""
    try:
        name: str = enumeration.Name(number)
    except ValueError:
        return f"UNKNOWN_{number}"
    return name.removeprefix(prefix)


def enum_value(kind: type[E], enumeration: Any, number: int, prefix: str) -> E:
    """The value of an enum's number; `unknown` for one that this SDK does not know yet."""
    value: E = _enum_value(kind, enumeration, number, prefix)
    return value


@lru_cache(maxsize=1024)
def _enum_value(kind: type[enum.StrEnum], enumeration: Any, number: int, prefix: str) -> Any:
    name = _name(enumeration, number, prefix).lower()
    return kind(name) if name in kind._value2member_map_ else kind("unknown")


def sandbox_info(message: sandbox_pb2.Sandbox) -> types.SandboxInfo:
    """A sandbox."""
    spec = message.spec
    return types.SandboxInfo(
        sandbox_id=message.sandbox_id,
        uid=message.uid,
        tenant=message.tenant,
        state=enum_value(types.SandboxState, sandbox_pb2.SandboxState, message.state, "SANDBOX_STATE_"),
        reason=_name(sandbox_pb2.SandboxReason, message.reason, "SANDBOX_REASON_"),
        message=message.message,
        image=spec.image,
        labels=dict(spec.labels),
        env=dict(spec.env),
        cpu=spec.resources.cpu,
        memory_bytes=spec.resources.memory_bytes,
        network=_name(sandbox_pb2.NetworkMode, spec.network.mode, "NETWORK_MODE_").lower() or "none",
        working_directory=spec.working_directory,
        user=spec.user,
        request_id=message.request_id,
        create_time=time_of(message, "create_time"),
        ready_time=time_of(message, "ready_time"),
        end_time=time_of(message, "end_time"),
        expire_time=time_of(message, "expire_time"),
    )


@lru_cache(maxsize=64)
def exec_end(number: int) -> types.ExecEnd:
    """How a command ended."""
    return enum_value(types.ExecEnd, exec_pb2.ExecEnd, number, "EXEC_END_")


def stream_name(number: int) -> str:
    """The name of an output stream."""
    return "stderr" if number == exec_pb2.OUTPUT_STREAM_STDERR else "stdout"


def exec_info(message: exec_pb2.Exec) -> types.ExecInfo:
    """A command without its output."""
    ended = message.state == exec_pb2.EXEC_STATE_ENDED
    return types.ExecInfo(
        exec_id=message.exec_id,
        state=enum_value(types.ExecState, exec_pb2.ExecState, message.state, "EXEC_STATE_"),
        command=message.command,
        pid=message.pid,
        output_size=message.output_bytes,
        create_time=time_of(message, "create_time"),
        start_time=time_of(message, "start_time"),
        ended=exec_end(message.result.ended) if ended else None,
        exit_code=message.result.exit_code if ended else None,
        end_time=time_of(message.result, "end_time"),
        signal=message.result.signal,
    )


def exec_result(
    exec_id: str, message: exec_pb2.ExecResult, chunks: Iterable[tuple[str, bytes]], *, command: str, missing: int
) -> types.ExecResult:
    """A finished command with the output that was received; `missing` counts the bytes that were skipped."""
    return types.ExecResult(
        exec_id=exec_id,
        ended=exec_end(message.ended),
        exit_code=message.exit_code if message.ended == exec_pb2.EXEC_END_EXITED else -1,
        signal=message.signal,
        message=message.message,
        start_time=time_of(message, "start_time"),
        end_time=time_of(message, "end_time"),
        user_cpu=duration_seconds(message.user_cpu),
        system_cpu=duration_seconds(message.system_cpu),
        peak_memory_bytes=message.peak_memory_bytes,
        output_size=message.output_bytes,
        dropped_bytes=missing,
        chunks=tuple(chunks),
        command=command,
    )


def file_info(message: file_pb2.FileInfo) -> types.FileInfo:
    """A directory entry."""
    return types.FileInfo(
        path=message.path,
        type=enum_value(types.FileType, file_pb2.FileType, message.type, "FILE_TYPE_"),
        size=message.size,
        mode=message.mode,
        uid=message.uid,
        gid=message.gid,
        modify_time=time_of(message, "modify_time"),
        link_target=message.link_target,
        raw_path=message.raw_path or message.path.encode(),
    )


def patch_file(message: file_pb2.PatchFileResult) -> types.PatchFile:
    """What became of one file of a patch."""
    return types.PatchFile(
        path=message.path,
        old_path=message.old_path,
        action=_name(file_pb2.PatchAction, message.action, "PATCH_ACTION_").lower(),
        hunks=tuple(
            types.PatchHunk(h.number, h.applied, h.expected_line, h.applied_line, h.fuzz, h.error)
            for h in message.hunks
        ),
        error=message.error,
    )


def api_key(message: admin_pb2.ApiKey) -> types.ApiKey:
    """A key's description."""
    return types.ApiKey(
        key_id=message.key_id,
        tenant=message.tenant,
        name=message.name,
        roles=tuple(_name(admin_pb2.Role, role, "ROLE_").lower() for role in message.roles),
        create_time=time_of(message, "create_time"),
        expire_time=time_of(message, "expire_time"),
        revoke_time=time_of(message, "revoke_time"),
        scopes=tuple(message.scopes),
    )


def image(message: admin_pb2.Image) -> types.Image:
    """An image."""
    return types.Image(message.name, message.digest, message.size, time_of(message, "import_time"))


def usage(message: admin_pb2.Usage) -> types.Usage:
    """What was used."""
    return types.Usage(
        message.tenant,
        message.label_value,
        message.sandboxes,
        message.sandbox_seconds,
        message.cpu_hours,
        message.memory_gib_hours,
    )
