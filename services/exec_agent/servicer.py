"""ExecService and AgentService: protos to the domain and back."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias, TypeVar

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from orchard.exec.v1 import agent_service_pb2, agent_service_pb2_grpc, exec_pb2, exec_service_pb2, exec_service_pb2_grpc

from services.common.errors import InvalidArgumentError
from services.common.interceptor import current_call
from services.common.pages import decode_token, encode_token
from services.common.telemetry import AGENT_SPAN_KEY, TRACEPARENT, agent_span
from services.common.validation import DAY_SECONDS, MEBIBYTE, Fields, seconds_of
from services.exec_agent.addressee import fields_for
from services.exec_agent.execution import Execution
from services.exec_agent.model import Chunk, Command, Gap
from services.exec_agent.process import Target
from services.exec_agent.reader import OutputReader
from services.exec_agent.service import DEFAULT_RETAINED, START_EXEC_ID, ExecService
from services.exec_agent.settings import VERSION, AgentConfig

INLINE_OUTPUT: Final = 512 << 10
_STDIN_LIMIT: Final = 512 << 10
_DEFAULT_TIMEOUT: Final = 3600.0
_LONGEST_TIMEOUT: Final = 30 * DAY_SECONDS
_DEFAULT_GRACE: Final = 5.0

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
        len(spec.stdin) <= _STDIN_LIMIT, "spec.stdin", "must be at most 512 KiB; upload longer input as a file"
    )
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
        concurrent=spec.concurrent,
        merge_stderr=spec.merge_stderr,
        output_limit=spec.output_limit_bytes,
        retained_limit=spec.retained_limit_bytes or DEFAULT_RETAINED,
        orphan_timeout=_seconds(fields, spec, "orphan_timeout", 0.001, _LONGEST_TIMEOUT),
        kill_grace=_DEFAULT_GRACE if grace is None else grace,
        stdin=spec.stdin,
    )


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


def _fill(chunk: exec_pb2.OutputChunk, found: Chunk) -> None:
    """Fill a chunk in place: one that is passed to a constructor is copied, which at 256 KiB costs 0.8 ms."""
    chunk.offset = found.offset
    chunk.stream = exec_pb2.OutputStream.ValueType(found.stream)
    chunk.data = found.data


_OutputEvent = TypeVar("_OutputEvent", exec_service_pb2.ReadOutputResponse, exec_service_pb2.ExecResponse)


def _output_event(event: _OutputEvent, found: Chunk | Gap) -> _OutputEvent:
    if isinstance(found, Chunk):
        _fill(event.chunk, found)
    else:
        event.gap.offset, event.gap.size = found
    return event


class ExecServicer(exec_service_pb2_grpc.ExecServiceServicer):
    """See the proto."""

    def __init__(self, service: ExecService, config: AgentConfig) -> None:
        self._service = service
        self._sandbox_id = config.sandbox_id

    async def StartExec(  # noqa: N802
        self, request: exec_service_pb2.StartExecRequest, context: Context
    ) -> exec_service_pb2.StartExecResponse:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self._fields(request.sandbox_id, request.exec_id)
        wait = seconds_of(request.wait)
        fields.check(0 <= wait <= 60, "wait", "must be from 0 s to 60 s; use WaitExec or ReadOutput for longer")
        execution = self._start(fields, request.exec_id, request.spec)
        execution.call_opened()
        try:
            if execution.pump is not None:
                await execution.begun.wait()
            if wait > 0:
                await execution.done.wait(wait)
        finally:
            execution.call_closed()
        execution.check_interrupted()
        if execution.start_error is not None:
            raise execution.start_error
        _trace("StartExec", started_ns, self._sandbox_id, execution, context)
        response = exec_service_pb2.StartExecResponse(exec=exec_message(execution))
        if wait > 0 and execution.result is not None:
            self._add_output(response, execution)
        return response

    def _add_output(self, response: exec_service_pb2.StartExecResponse, execution: Execution) -> None:
        spool = execution.spool
        end, offset = min(spool.end, INLINE_OUTPUT), 0
        while offset < end:
            found = spool.read(offset, min(end - offset, 64 << 10), may_block=True)
            if not isinstance(found, Chunk):
                return
            _fill(response.output.add(), found)
            offset += len(found.data)
        response.output_complete = offset == spool.end

    async def ReadOutput(  # noqa: N802
        self, request: exec_service_pb2.ReadOutputRequest, context: Context
    ) -> AsyncIterator[exec_service_pb2.ReadOutputResponse]:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self._fields(request.sandbox_id, request.exec_id)
        fields.check(request.offset >= 0, "offset", "must not be negative")
        fields.done()
        execution = self._service.find(request.exec_id)
        reader = self._service.read(execution, request.offset, follow=not request.no_follow)
        _at_end(context, reader)
        try:
            while (found := await reader.next()) is not None:
                yield _output_event(exec_service_pb2.ReadOutputResponse(), found)
            if execution.result is not None:
                yield exec_service_pb2.ReadOutputResponse(result=result_message(execution))
        finally:
            reader.close()
        _trace("ReadOutput", started_ns, self._sandbox_id, execution, context)

    async def Exec(  # noqa: N802
        self, request: exec_service_pb2.ExecRequest, context: Context
    ) -> AsyncIterator[exec_service_pb2.ExecResponse]:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self._fields(request.sandbox_id, request.exec_id)
        fields.check(request.offset >= 0, "offset", "must not be negative")
        execution = self._start(fields, request.exec_id, request.spec)
        reader = self._service.read(execution, request.offset, follow=True)
        _at_end(context, reader)
        try:
            if execution.pump is not None:
                await execution.begun.wait()
            execution.check_interrupted()
            if execution.start_error is not None:
                raise execution.start_error
            yield exec_service_pb2.ExecResponse(started=exec_message(execution))
            while (found := await reader.next()) is not None:
                yield _output_event(exec_service_pb2.ExecResponse(), found)
            if execution.start_error is not None:
                raise execution.start_error
            yield exec_service_pb2.ExecResponse(result=result_message(execution))
        finally:
            reader.close()
        _trace("Exec", started_ns, self._sandbox_id, execution, context)

    async def WaitExec(  # noqa: N802
        self, request: exec_service_pb2.WaitExecRequest, context: Context
    ) -> exec_service_pb2.WaitExecResponse:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self._fields(request.sandbox_id, request.exec_id)
        wait = seconds_of(request.wait)
        fields.check(0 <= wait <= 600, "wait", "must be from 0 s to 10 min; call again for longer")
        fields.done()
        execution = self._service.find(request.exec_id)
        execution.call_opened()
        try:
            await execution.done.wait(wait)
        finally:
            execution.call_closed()
        execution.check_interrupted()
        _trace("WaitExec", started_ns, self._sandbox_id, execution, context)
        return exec_service_pb2.WaitExecResponse(exec=exec_message(execution))

    async def SignalExec(  # noqa: N802
        self,
        request: exec_service_pb2.SignalExecRequest,
        context: Context,  # noqa: ARG002
    ) -> exec_service_pb2.SignalExecResponse:
        """See the proto."""
        fields = self._fields(request.sandbox_id, request.exec_id)
        if request.cancel:
            fields.check(request.signal == 0, "signal", "must be unset with cancel, which chooses its own signals")
        else:
            fields.check(1 <= request.signal <= 64, "signal", "must be from 1 to 64, unless cancel is set")
        fields.check(0 <= request.target <= 2, "target", "must be TREE or LEADER")
        fields.token_id("request_id", request.request_id, optional=True)
        fields.done()
        if request.cancel:
            execution = self._service.cancel(request.exec_id)
        else:
            target = Target(request.target or 1)
            execution = self._service.signal(request.exec_id, target, request.signal, request.request_id)
        return exec_service_pb2.SignalExecResponse(exec=exec_message(execution))

    async def ListExecs(  # noqa: N802
        self,
        request: exec_service_pb2.ListExecsRequest,
        context: Context,  # noqa: ARG002
    ) -> exec_service_pb2.ListExecsResponse:
        """See the proto."""
        fields = self._fields(request.sandbox_id, None)
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.done()
        before: int | None = None
        if request.page_token:
            (before,) = decode_token("page_token", request.page_token, (int,))
        response = exec_service_pb2.ListExecsResponse()
        last = 0
        for execution in self._service.newest_first(before):
            if len(response.execs) == size:
                response.next_page_token = encode_token((last,))
                break
            response.execs.append(exec_message(execution))
            last = execution.sequence
        return response

    def _start(self, fields: Fields, exec_id: str, spec: exec_pb2.ExecSpec) -> Execution:
        command = command_of(fields, spec)
        fields.done()
        if exec_id == START_EXEC_ID and not self._service.knows(START_EXEC_ID):
            raise InvalidArgumentError.of(
                "exec_id", "'start' is kept for the sandbox's start command; choose another id"
            )
        return self._service.start(exec_id, command)

    def _fields(self, sandbox_id: str, exec_id: str | None) -> Fields:
        fields = fields_for(self._sandbox_id, sandbox_id)
        if exec_id is not None:
            fields.token_id("exec_id", exec_id)
        return fields


class AgentServicer(agent_service_pb2_grpc.AgentServiceServicer):
    """See the proto."""

    def __init__(self, service: ExecService, config: AgentConfig) -> None:
        self._service = service
        self._config = config

    async def SetSecretEnv(  # noqa: N802
        self,
        request: agent_service_pb2.SetSecretEnvRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_service_pb2.SetSecretEnvResponse:
        """See the proto."""
        fields = Fields()
        fields.env("secret_env", request.secret_env)
        fields.done()
        self._service.set_secret_env(request.secret_env)
        return agent_service_pb2.SetSecretEnvResponse()

    async def GetAgent(  # noqa: N802
        self,
        request: agent_service_pb2.GetAgentRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> agent_service_pb2.GetAgentResponse:
        """See the proto."""
        config = self._config
        return agent_service_pb2.GetAgentResponse(
            version=VERSION, uid=config.uid, gaps=config.gaps, restarts=config.restarts
        )


def _at_end(context: Context, reader: OutputReader) -> None:
    """Close the reader with its call: a client can leave between two messages, and the generator is collected later."""

    def ended(_context: Context) -> None:
        reader.close()

    context.add_done_callback(ended)  # type: ignore[arg-type]


def _trace(method: str, started_ns: int, sandbox_id: str, execution: Execution, context: Context) -> None:
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
