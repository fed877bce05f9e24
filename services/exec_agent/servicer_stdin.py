"""The half of ExecService that is about input and terminals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncIterator

from orchard.exec.v1 import exec_pb2, exec_service_pb2, exec_service_pb2_grpc

from services.common.errors import InvalidArgumentError, Violation
from services.common.validation import MEBIBYTE, Fields
from services.exec_agent.addressee import fields_for
from services.exec_agent.execution import Execution
from services.exec_agent.service import ExecService
from services.exec_agent.servicer_attach import Attachment
from services.exec_agent.servicer_messages import (
    Context,
    check_size,
    command_of,
    exec_message,
    stdin_message,
    trace,
)
from services.exec_agent.settings import AgentConfig
from services.exec_agent.start_command import START_EXEC_ID
from services.exec_agent.stdin import Stdin


class StdinServicer(exec_service_pb2_grpc.ExecServiceServicer):
    """See the proto."""

    def __init__(self, service: ExecService, config: AgentConfig) -> None:
        self._service = service
        self._sandbox_id = config.sandbox_id

    async def WriteStdin(  # noqa: N802
        self,
        request_iterator: AsyncIterator[exec_service_pb2.WriteStdinRequest],
        context: Context,
    ) -> exec_service_pb2.WriteStdinResponse:
        """See the proto."""
        started_ns = time.time_ns()
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("payload") != "start":
            raise InvalidArgumentError.of("start", "the first message must be a start that says of which exec")
        fields = self.fields(first.sandbox_id, None)
        fields.token_id("start.exec_id", first.start.exec_id)
        fields.check(first.start.offset >= 0, "start.offset", "must not be negative")
        fields.done()
        execution = self._service.find(first.start.exec_id)
        stdin = self._service.stdin_of(execution)
        execution.call_opened()
        try:
            await _write(stdin, first.start.offset, request_iterator)
        finally:
            execution.call_closed()
        trace("WriteStdin", started_ns, self._sandbox_id, execution, context)
        return exec_service_pb2.WriteStdinResponse(state=stdin_message(stdin))

    async def GetStdin(  # noqa: N802
        self,
        request: exec_service_pb2.GetStdinRequest,
        context: Context,  # noqa: ARG002
    ) -> exec_service_pb2.GetStdinResponse:
        """See the proto."""
        self.fields(request.sandbox_id, request.exec_id).done()
        stdin = self._service.stdin_of(self._service.find(request.exec_id))
        return exec_service_pb2.GetStdinResponse(state=stdin_message(stdin))

    async def ResizePty(  # noqa: N802
        self,
        request: exec_service_pb2.ResizePtyRequest,
        context: Context,  # noqa: ARG002
    ) -> exec_service_pb2.ResizePtyResponse:
        """See the proto."""
        fields = self.fields(request.sandbox_id, request.exec_id)
        check_size(fields, "size", request.size)
        fields.done()
        execution = self._service.find(request.exec_id)
        self._service.resize(execution, request.size.rows, request.size.columns)
        return exec_service_pb2.ResizePtyResponse(exec=exec_message(execution))

    async def Attach(  # noqa: N802
        self,
        request_iterator: AsyncIterator[exec_service_pb2.AttachRequest],
        context: Context,
    ) -> AsyncIterator[exec_service_pb2.AttachResponse]:
        """See the proto."""
        started_ns = time.time_ns()
        first = await anext(aiter(request_iterator), None)
        if first is None or first.WhichOneof("payload") != "start":
            raise InvalidArgumentError.of("start", "the first message must be a start that says to which exec")
        execution = self._attached(first)
        reader = self._service.read(execution, first.start.output_offset, follow=True)
        attachment = Attachment(self._service, execution, reader)
        context.add_done_callback(attachment.ended)  # type: ignore[arg-type]
        try:
            if execution.pump is not None:
                await execution.begun.wait()
            execution.check_interrupted()
            if execution.start_error is not None:
                raise execution.start_error
            async for response in attachment.responses(request_iterator):
                yield response
        finally:
            attachment.close()
        trace("Attach", started_ns, self._sandbox_id, execution, context)

    def _attached(self, first: exec_service_pb2.AttachRequest) -> Execution:
        start = first.start
        fields = self.fields(first.sandbox_id, None)
        try:
            fields.token_id("exec_id", start.exec_id)
            fields.check(start.output_offset >= 0, "output_offset", "must not be negative")
            if start.HasField("spec"):
                return self.begin(fields, start.exec_id, start.spec, at_once=True)
            fields.done()
        except InvalidArgumentError as error:
            raise InvalidArgumentError([_in_start(v) for v in error.violations], reason=error.reason) from None
        return self._service.find(start.exec_id)

    def begin(self, fields: Fields, exec_id: str, spec: exec_pb2.ExecSpec, *, at_once: bool = False) -> Execution:
        """Start a command, or find the one that has this id. `at_once`: as with concurrent."""
        command = command_of(fields, spec)
        fields.done()
        if exec_id == START_EXEC_ID and not self._service.knows(START_EXEC_ID):
            raise InvalidArgumentError.of(
                "exec_id", "'start' is kept for the sandbox's start command; choose another id"
            )
        return self._service.start(exec_id, dataclasses.replace(command, concurrent=True) if at_once else command)

    def fields(self, sandbox_id: str, exec_id: str | None) -> Fields:
        """Field rules to go on with, for a request about this sandbox."""
        fields = fields_for(self._sandbox_id, sandbox_id)
        if exec_id is not None:
            fields.token_id("exec_id", exec_id)
        return fields


async def _write(stdin: Stdin, offset: int, requests: AsyncIterator[exec_service_pb2.WriteStdinRequest]) -> None:
    """Take the rest of a stream, until it ends, another one begins or the command has read too little for too long."""
    stdin.check_reached(offset)
    # A client that has given one write up, and asks where to go on, must not be overtaken by what is left of that one.
    writer = stdin.begin()
    ended = False
    async for request in requests:
        if ended:
            raise InvalidArgumentError.of("end", "must be the last message")
        payload = request.WhichOneof("payload")
        if payload == "data":
            if len(request.data) > MEBIBYTE:
                raise InvalidArgumentError.of("data", "must be at most 1 MiB a message; send it in smaller ones")
            if not await stdin.take(offset, request.data, writer=writer):
                return
            offset += len(request.data)
        elif payload == "end" and request.end:
            if not stdin.has_turn(writer):
                return
            stdin.end(offset)
            ended = True
        else:
            raise InvalidArgumentError.of("data", "every message after the first must bring data or end, true")


def _in_start(violation: Violation) -> Violation:
    field = violation.field
    return violation if field == "sandbox_id" else Violation(f"start.{field}", violation.description)
