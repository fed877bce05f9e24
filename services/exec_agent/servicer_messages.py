"""ExecService's messages: a spec checked and made a command, and how commands stand made messages."""

from __future__ import annotations

import hashlib
import re
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.exec.v1 import exec_pb2, exec_service_pb2

from services.common.interceptor import current_call
from services.common.telemetry import AGENT_SPAN_KEY, TRACEPARENT, agent_span
from services.common.validation import DAY_SECONDS, MEBIBYTE, Fields, seconds_of
from services.exec_agent.execution import Execution
from services.exec_agent.model import DEFAULT_RETAINED, Chunk, Command, Gap, Tty
from services.exec_agent.reader import OutputReader
from services.exec_agent.stdin import Stdin

_STDIN_LIMIT: Final = 512 << 10
_DEFAULT_TIMEOUT: Final = 3600.0
_LONGEST_TIMEOUT: Final = 30 * DAY_SECONDS
_DEFAULT_GRACE: Final = 5.0
_DEFAULT_SIZE: Final = exec_pb2.WindowSize(rows=24, columns=80)
_DEFAULT_TERM: Final = "xterm-256color"
_TERM: Final = re.compile(r"[A-Za-z0-9+._-]{1,64}")
_LARGEST_SIDE: Final = 65_535

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


def command_of(fields: Fields, spec: exec_pb2.ExecSpec) -> Command:
    """Check a spec, naming every bad field, and fill in its defaults."""
    _check_command(fields, spec)
    fields.check(not (spec.login_shell and spec.HasField("argv")), "spec.login_shell", "goes with shell, not with argv")
    if spec.env:
        fields.env("spec.env", spec.env)
    fields.text("spec.cwd", spec.cwd, maximum=4096)
    fields.text("spec.user", spec.user, maximum=256)
    fields.check(
        len(spec.stdin) <= _STDIN_LIMIT, "spec.stdin", "must be at most 512 KiB; set stdin_mode PIPE and use WriteStdin"
    )
    tty = _tty(fields, spec)
    fields.check(
        not (spec.no_timeout and spec.HasField("timeout")), "spec.no_timeout", "excludes timeout; set one of the two"
    )
    timeout = _seconds(fields, spec, "timeout", 0.001, _LONGEST_TIMEOUT)
    if timeout is None and not spec.no_timeout:
        timeout = _DEFAULT_TIMEOUT
    queue_timeout = _seconds(fields, spec, "queue_timeout", 0.001, _LONGEST_TIMEOUT)
    grace = _seconds(fields, spec, "kill_grace", 0.0, 600.0)
    fields.between("spec.output_limit_bytes", spec.output_limit_bytes, 1, 1 << 62)
    fields.between("spec.retained_limit_bytes", spec.retained_limit_bytes, 64 << 10, 1 << 30)
    return Command(
        spec_hash=hashlib.blake2b(spec.SerializeToString(deterministic=True), digest_size=16).hexdigest(),
        argv=tuple(spec.argv.args),
        shell=spec.shell,
        login_shell=spec.login_shell,
        env=dict(spec.env),
        cwd=spec.cwd,
        user=spec.user,
        timeout=timeout,
        queue_timeout=timeout if queue_timeout is None else queue_timeout,
        concurrent=spec.concurrent or tty is not None,
        merge_stderr=spec.merge_stderr,
        output_limit=spec.output_limit_bytes,
        retained_limit=spec.retained_limit_bytes or DEFAULT_RETAINED,
        orphan_timeout=_seconds(fields, spec, "orphan_timeout", 0.001, _LONGEST_TIMEOUT),
        kill_grace=_DEFAULT_GRACE if grace is None else grace,
        stdin=spec.stdin,
        stdin_open=spec.stdin_mode == exec_pb2.STDIN_MODE_PIPE,
        tty=tty,
    )


def _tty(fields: Fields, spec: exec_pb2.ExecSpec) -> Tty | None:
    """The terminal that a command is to get, if any; checks what goes with one."""
    has_tty = spec.HasField("tty")
    fields.check(0 <= spec.stdin_mode <= 1, "spec.stdin_mode", "must be PIPE or unset")
    if spec.stdin_mode:
        fields.check(not spec.stdin, "spec.stdin", "excludes stdin_mode; send all of it by WriteStdin")
        fields.check(not has_tty, "spec.stdin_mode", "must be unset with tty, whose input is open anyway")
    if not has_tty:
        return None
    fields.check(not spec.stdin, "spec.stdin", "excludes tty; send it by WriteStdin or Attach")
    fields.check(not spec.merge_stderr, "spec.merge_stderr", "must be unset with tty, which has one stream anyway")
    size = spec.tty.size if spec.tty.HasField("size") else _DEFAULT_SIZE
    check_size(fields, "spec.tty.size", size)
    term = spec.tty.term or _DEFAULT_TERM
    fields.check(_TERM.fullmatch(term) is not None, "spec.tty.term", 'must be 1 to 64 of A-Z, a-z, 0-9 and "+-._"')
    return Tty(size.rows, size.columns, term)


def check_size(fields: Fields, field: str, size: exec_pb2.WindowSize) -> None:
    """Check the size of a terminal."""
    fields.between(f"{field}.rows", size.rows, 1, _LARGEST_SIDE, zero=False)
    fields.between(f"{field}.columns", size.columns, 1, _LARGEST_SIDE, zero=False)


def _check_command(fields: Fields, spec: exec_pb2.ExecSpec) -> None:
    kind = spec.WhichOneof("command")
    if not fields.check(kind is not None, "spec.argv", "or spec.shell is required: say what to run"):
        return
    if kind == "shell":
        fields.text("spec.shell", spec.shell, maximum=MEBIBYTE, required=True)
        return
    fields.arguments("spec.argv.args", spec.argv.args)


def _seconds(fields: Fields, spec: exec_pb2.ExecSpec, name: str, minimum: float, maximum: float) -> float | None:
    if not spec.HasField(name):  # type: ignore[arg-type]
        return None
    duration: Duration = getattr(spec, name)
    fields.duration(f"spec.{name}", duration, minimum=minimum, maximum=maximum)
    return seconds_of(duration)


def _timestamp(nanoseconds: int) -> Timestamp:
    return Timestamp(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)


def _duration(microseconds: int) -> Duration:
    return Duration(seconds=microseconds // 1_000_000, nanos=microseconds % 1_000_000 * 1000)


def result_message(execution: Execution) -> exec_pb2.ExecResult:
    """The ExecResult of an ended execution."""
    result = execution.result
    if result is None:
        raise RuntimeError(f"exec {execution.exec_id} has not ended")
    return exec_pb2.ExecResult(
        ended=exec_pb2.ExecEnd.ValueType(result.ended),
        exit_code=result.exit_code,
        signal=result.signal,
        message=result.message,
        start_time=_timestamp(execution.start_ns) if execution.start_ns else None,
        end_time=_timestamp(result.end_ns),
        user_cpu=_duration(result.user_us),
        system_cpu=_duration(result.system_us),
        peak_memory_bytes=result.peak_bytes,
        output_bytes=execution.spool.end,
        dropped_bytes=execution.spool.start,
    )


def exec_message(execution: Execution) -> exec_pb2.Exec:
    """The Exec of an execution as it stands."""
    return exec_pb2.Exec(
        exec_id=execution.exec_id,
        state=exec_pb2.ExecState.ValueType(execution.state),
        create_time=_timestamp(execution.create_ns),
        start_time=_timestamp(execution.start_ns) if execution.start_ns else None,
        pid=execution.pid,
        result=result_message(execution) if execution.result is not None else None,
        command=execution.command.display() if execution.command is not None else "",
        output_bytes=execution.spool.end,
    )


def stdin_message(stdin: Stdin) -> exec_pb2.StdinState:
    """How far a command's input has come."""
    return exec_pb2.StdinState(offset=stdin.offset, written=stdin.written, closed=stdin.closed)


def fill(chunk: exec_pb2.OutputChunk, found: Chunk) -> None:
    """Fill a chunk in place: one that is passed to a constructor is copied, which at 256 KiB costs 0.8 ms."""
    chunk.offset = found.offset
    chunk.stream = exec_pb2.OutputStream.ValueType(found.stream)
    chunk.data = found.data


_OutputEvent = TypeVar("_OutputEvent", exec_service_pb2.ReadOutputResponse, exec_service_pb2.ExecResponse)


def output_event(event: _OutputEvent, found: Chunk | Gap) -> _OutputEvent:
    """Fill an empty event with output, or with the gap where some is gone."""
    if isinstance(found, Chunk):
        fill(event.chunk, found)
    else:
        event.gap.offset, event.gap.size = found
    return event


def at_end(context: Context, reader: OutputReader) -> None:
    """Close the reader with its call: a client can leave between two messages, and the generator is collected later."""

    def ended(_context: Context) -> None:
        reader.close()

    context.add_done_callback(ended)  # type: ignore[arg-type]


def trace(method: str, started_ns: int, sandbox_id: str, execution: Execution, context: Context) -> None:
    """Hand the caller a finished span of this call, if it traces."""
    if not any(key == TRACEPARENT for key, _ in context.invocation_metadata() or ()):
        return
    attributes: dict[str, str | int] = {
        "orchard.exec_id": execution.exec_id,
        "orchard.sandbox_id": sandbox_id,
        "orchard.output_bytes": execution.spool.end,
    }
    if execution.result is not None:
        attributes["orchard.exit_code"] = execution.result.exit_code
        attributes["orchard.ended"] = execution.result.ended.name
    span = agent_span(f"agent {method}", started_ns, attributes)
    current_call.get().trailing.append((AGENT_SPAN_KEY, span))
