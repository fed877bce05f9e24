"""ExecService and AgentService: protos to the domain and back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Final

from orchard.exec.v1 import agent_service_pb2, agent_service_pb2_grpc, exec_service_pb2

from services.common.pages import decode_token, encode_token
from services.common.validation import seconds_of
from services.exec_agent.addressee import fields_for
from services.exec_agent.execution import Execution
from services.exec_agent.expected_reader import ExpectedReader
from services.exec_agent.model import Chunk
from services.exec_agent.process import Target
from services.exec_agent.service import ExecService
from services.exec_agent.servicer_messages import (
    Context,
    at_end,
    exec_message,
    fill,
    output_event,
    result_message,
    trace,
)
from services.exec_agent.servicer_stdin import StdinServicer
from services.exec_agent.settings import VERSION, AgentConfig

INLINE_OUTPUT: Final = 512 << 10
_READER_SECONDS: Final = 10.0
"""How long a command is held up for a caller that said that it reads on."""


class ExecServicer(StdinServicer):
    """See the proto."""

    async def StartExec(  # noqa: N802
        self, request: exec_service_pb2.StartExecRequest, context: Context
    ) -> exec_service_pb2.StartExecResponse:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self.fields(request.sandbox_id, request.exec_id)
        wait = seconds_of(request.wait)
        fields.check(0 <= wait <= 60, "wait", "must be from 0 s to 60 s; use WaitExec or ReadOutput for longer")
        execution = self.begin(fields, request.exec_id, request.spec)
        expected = ExpectedReader(execution, INLINE_OUTPUT) if request.reads_on else None
        execution.call_opened()
        try:
            if execution.pump is not None:
                await execution.begun.wait()
            if expected is not None:
                await expected.wait(wait)
            elif wait > 0:
                await execution.done.wait(wait)
        finally:
            execution.call_closed()
            if expected is not None:
                # Also where this call was cut off: whoever made it may call again.
                expected.close(_READER_SECONDS if execution.result is None else 0.0)
        execution.check_interrupted()
        if execution.start_error is not None:
            raise execution.start_error
        trace("StartExec", started_ns, self._sandbox_id, execution, context)
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
            fill(response.output.add(), found)
            offset += len(found.data)
        response.output_complete = offset == spool.end

    async def ReadOutput(  # noqa: N802
        self, request: exec_service_pb2.ReadOutputRequest, context: Context
    ) -> AsyncIterator[exec_service_pb2.ReadOutputResponse]:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self.fields(request.sandbox_id, request.exec_id)
        fields.check(request.offset >= 0, "offset", "must not be negative")
        fields.done()
        execution = self._service.find(request.exec_id)
        reader = self._service.read(execution, request.offset, follow=not request.no_follow)
        at_end(context, reader)
        try:
            while (found := await reader.next()) is not None:
                yield output_event(exec_service_pb2.ReadOutputResponse(), found)
            if execution.result is not None:
                yield exec_service_pb2.ReadOutputResponse(result=result_message(execution))
        finally:
            reader.close()
        trace("ReadOutput", started_ns, self._sandbox_id, execution, context)

    async def Exec(  # noqa: N802
        self, request: exec_service_pb2.ExecRequest, context: Context
    ) -> AsyncIterator[exec_service_pb2.ExecResponse]:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self.fields(request.sandbox_id, request.exec_id)
        fields.check(request.offset >= 0, "offset", "must not be negative")
        execution = self.begin(fields, request.exec_id, request.spec)
        reader = self._service.read(execution, request.offset, follow=True)
        at_end(context, reader)
        try:
            if execution.pump is not None:
                await execution.begun.wait()
            execution.check_interrupted()
            if execution.start_error is not None:
                raise execution.start_error
            yield exec_service_pb2.ExecResponse(started=exec_message(execution))
            while (found := await reader.next()) is not None:
                yield output_event(exec_service_pb2.ExecResponse(), found)
            if execution.start_error is not None:
                raise execution.start_error
            yield exec_service_pb2.ExecResponse(result=result_message(execution))
        finally:
            reader.close()
        trace("Exec", started_ns, self._sandbox_id, execution, context)

    async def WaitExec(  # noqa: N802
        self, request: exec_service_pb2.WaitExecRequest, context: Context
    ) -> exec_service_pb2.WaitExecResponse:
        """See the proto."""
        started_ns = time.time_ns()
        fields = self.fields(request.sandbox_id, request.exec_id)
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
        trace("WaitExec", started_ns, self._sandbox_id, execution, context)
        return exec_service_pb2.WaitExecResponse(exec=exec_message(execution))

    async def SignalExec(  # noqa: N802
        self,
        request: exec_service_pb2.SignalExecRequest,
        context: Context,  # noqa: ARG002
    ) -> exec_service_pb2.SignalExecResponse:
        """See the proto."""
        fields = self.fields(request.sandbox_id, request.exec_id)
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
        fields = self.fields(request.sandbox_id, None)
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
        fields = fields_for(self._config.sandbox_id, request.sandbox_id)
        fields.env("secret_env", request.secret_env)
        fields.done()
        self._service.set_secret_env(request.secret_env)
        return agent_service_pb2.SetSecretEnvResponse()

    async def GetAgent(  # noqa: N802
        self,
        request: agent_service_pb2.GetAgentRequest,
        context: Context,  # noqa: ARG002
    ) -> agent_service_pb2.GetAgentResponse:
        """See the proto."""
        config = self._config
        fields_for(config.sandbox_id, request.sandbox_id).done()
        return agent_service_pb2.GetAgentResponse(
            version=VERSION, uid=config.uid, gaps=config.gaps, restarts=config.restarts
        )
