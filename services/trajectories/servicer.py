"""TrajectoryService: the wire on one side, use cases on the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from datetime import datetime
from typing import Any, Final

import grpc
from google.protobuf.message import Message
from orchard.trajectory.v1 import trajectory_pb2
from orchard.trajectory.v1 import trajectory_service_pb2 as pb

from services.common.auth import principal
from services.common.errors import InvalidArgumentError, OrchardError
from services.common.pages import bad_token, decode_token, encode_token
from services.common.validation import Fields
from services.trajectories import servicer_values as values
from services.trajectories.bodies import Bodies
from services.trajectories.exporting import Exporter
from services.trajectories.model import BlobReference, NewStep, Order, Status, Whole
from services.trajectories.service import Trajectories
from services.trajectories.servicer_export import messages
from services.trajectories.servicer_steps import new_steps
from services.trajectories.servicer_wholes import check_call, new_whole
from services.trajectories.store.appends import Append
from services.trajectories.wholes import Wholes, naming

_SERVICE: Final = pb.DESCRIPTOR.services_by_name["TrajectoryService"]


class TrajectoryServicer:
    """Serves orchard.trajectory.v1.TrajectoryService. Steps go out as they are stored, so two methods answer bytes."""

    def __init__(
        self,
        trajectories: Trajectories,
        wholes: Wholes,
        exporter: Exporter,
        bodies: Bodies,
        stopping: asyncio.Event,
    ) -> None:
        self._trajectories = trajectories
        self._wholes = wholes
        self._exporter = exporter
        self._bodies = bodies
        self._stopping = stopping

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server is given."""
        return grpc.method_handlers_generic_handler(
            _SERVICE.full_name, {method.name: self._handler(method) for method in _SERVICE.methods}
        )

    def _handler(self, method: Any) -> grpc.RpcMethodHandler[Any, Any]:
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
        }[method.client_streaming, method.server_streaming]
        request: type[Message] = getattr(pb, method.input_type.name)
        return make(
            getattr(self, method.name), request_deserializer=request.FromString, response_serializer=_serialized
        )

    async def CreateTrajectory(  # noqa: N802 (gRPC's names, here and below)
        self,
        request: pb.CreateTrajectoryRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.CreateTrajectoryResponse:
        """See trajectory_service.proto."""
        description = values.description(request.trajectory)
        found = await self._trajectories.create(principal().tenant, description)
        return pb.CreateTrajectoryResponse(trajectory=values.trajectory_message(found))

    async def AppendSteps(  # noqa: N802
        self,
        requests: AsyncIterator[pb.AppendStepsRequest],
        context: Any,  # noqa: ARG002
    ) -> pb.AppendStepsResponse:
        """See trajectory_service.proto."""
        tenant, start, next_index = principal().tenant, None, None
        async for request in requests:
            if start is None:
                start = _append_start(request)
                continue
            if request.WhichOneof("part") != "steps":
                raise InvalidArgumentError.of("steps", "every message after the first has steps")
            steps = await new_steps(request.steps.steps, tenant, self._bodies)
            next_index = await self._append(tenant, start, steps)
        if start is None:
            raise InvalidArgumentError.of("start", "the stream ended before its first message")
        if next_index is None:
            next_index = await self._append(tenant, start, [])
        return pb.AppendStepsResponse(next_index=next_index)

    async def _append(self, tenant: str, start: pb.AppendStart, steps: Sequence[NewStep]) -> int:
        append = Append(tenant, start.trajectory_id, start.writer, start.take_over, tuple(steps))
        next_index = await self._trajectories.append(append)
        start.take_over = False  # once is enough: who takes over afterwards is not to be driven out again
        return next_index

    async def SealTrajectory(  # noqa: N802
        self,
        request: pb.SealTrajectoryRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.SealTrajectoryResponse:
        """See trajectory_service.proto."""
        fields = Fields()
        values.check_id(fields, "trajectory_id", request.trajectory_id)
        values.check_end(fields, request.status, request.message)
        fields.done()
        expected = request.expected_steps if request.HasField("expected_steps") else None
        found = await self._trajectories.seal(
            principal().tenant, request.trajectory_id, Status(request.status), request.message, expected
        )
        return pb.SealTrajectoryResponse(trajectory=values.trajectory_message(found))

    async def StoreTrajectories(  # noqa: N802
        self,
        request: pb.StoreTrajectoriesRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.StoreTrajectoriesResponse:
        """See trajectory_service.proto."""
        check_call(request)
        tenant, wholes = principal().tenant, list[Whole]()
        refused: OrchardError | None = None
        for position, message in enumerate(request.trajectories):
            try:
                with naming(position, message.trajectory.trajectory_id):
                    wholes.append(await new_whole(message, tenant, self._bodies))
            except OrchardError as error:
                refused = error
                break
        sealed = await self._wholes.store(tenant, wholes)
        if refused is not None:
            raise refused
        return pb.StoreTrajectoriesResponse(
            trajectories=[
                pb.StoredTrajectory(trajectory_id=whole.trajectory_id, was_sealed=was)
                for whole, was in zip(wholes, sealed, strict=True)
            ]
        )

    async def GetTrajectory(  # noqa: N802
        self,
        request: pb.GetTrajectoryRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.GetTrajectoryResponse:
        """See trajectory_service.proto."""
        _check_id(request.trajectory_id)
        found = await self._trajectories.get(principal().tenant, request.trajectory_id)
        step_values = (await self._trajectories.step_values([found.key])).get(found.key, ())
        return pb.GetTrajectoryResponse(
            trajectory=values.trajectory_message(found), step_values=map(values.step_value_message, step_values)
        )

    async def ReadSteps(  # noqa: N802
        self,
        request: pb.ReadStepsRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[bytes]:
        """See trajectory_service.proto."""
        _check_id(request.trajectory_id)
        if request.from_index < 0:
            raise InvalidArgumentError.of("from_index", "must not be negative")
        found = await self._trajectories.get(principal().tenant, request.trajectory_id)
        if request.follow:
            async for framed in self._trajectories.follow(found, request.from_index, self._stopping.is_set):
                yield framed
            return
        async with aclosing(self._trajectories.read(found, request.from_index)) as runs:
            async for run in runs:
                yield run.framed

    async def ListTrajectories(  # noqa: N802
        self,
        request: pb.ListTrajectoriesRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.ListTrajectoriesResponse:
        """See trajectory_service.proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        order = values.order_of(fields, request.order)
        fields.done()
        found, after = await self._trajectories.page(
            principal().tenant,
            values.filter_of(request.filter),
            order,
            ascending=request.ascending,
            after=_position(request.page_token, order, request.ascending) if request.page_token else None,
            count=size,
        )
        response = pb.ListTrajectoriesResponse()
        for one in found:
            values.write_trajectory(response.trajectories.add(), one)
        if after:
            response.next_page_token = encode_token((order.name, request.ascending, *after))
        return response

    async def ExportTrajectories(  # noqa: N802
        self,
        request: pb.ExportTrajectoriesRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[bytes]:
        """See trajectory_service.proto."""
        tenant, wanted = principal().tenant, values.filter_of(request.filter)
        after = decode_token("resume_token", request.resume_token, (int,))[0] if request.resume_token else 0
        total = await self._trajectories.count(tenant, wanted)
        yield pb.ExportTrajectoriesResponse(total=total).SerializeToString()
        with_steps = not request.metadata_only
        async with aclosing(self._exporter.export(tenant, wanted, after, with_steps=with_steps)) as exported:
            read = self._trajectories.read
            async with aclosing(messages(exported, read, with_steps=with_steps, several=request.several)) as found:
                async for message in found:
                    yield message

    async def AnnotateTrajectory(  # noqa: N802
        self,
        request: pb.AnnotateTrajectoryRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.AnnotateTrajectoryResponse:
        """See trajectory_service.proto."""
        annotation = values.annotation(request)
        found = await self._trajectories.annotate(principal().tenant, request.trajectory_id, annotation)
        return pb.AnnotateTrajectoryResponse(trajectory=values.trajectory_message(found))

    async def ListAnnotations(  # noqa: N802
        self,
        request: pb.ListAnnotationsRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.ListAnnotationsResponse:
        """See trajectory_service.proto."""
        fields = Fields()
        values.check_id(fields, "trajectory_id", request.trajectory_id)
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.done()
        before = decode_token("page_token", request.page_token, (int,))[0] if request.page_token else None
        found, after = await self._trajectories.history(principal().tenant, request.trajectory_id, before, size)
        return pb.ListAnnotationsResponse(
            annotations=map(values.annotation_message, found), next_page_token=encode_token((after,)) if after else ""
        )

    async def DeleteTrajectories(  # noqa: N802
        self,
        request: pb.DeleteTrajectoriesRequest,
        context: Any,  # noqa: ARG002
    ) -> pb.DeleteTrajectoriesResponse:
        """See trajectory_service.proto."""
        wanted = values.filter_of(request.filter)
        fields = Fields()
        fields.between("limit", request.limit, 1, 10_000)
        fields.check(not wanted.is_empty or request.all, "filter", "selects everything; set all to mean it")
        fields.check(wanted.is_empty or not request.all, "all", "goes without a filter")
        fields.done()
        deleted = await self._trajectories.delete(
            principal().tenant,
            wanted,
            include_open=request.include_open,
            limit=request.limit or 1000,
            dry_run=request.dry_run,
        )
        return pb.DeleteTrajectoriesResponse(
            deleted=deleted.deleted,
            remaining=deleted.remaining,
            text_bytes=deleted.text_bytes,
            open_skipped=deleted.open_skipped,
        )

    async def GetStats(self, request: pb.GetStatsRequest, context: Any) -> pb.GetStatsResponse:  # noqa: N802, ARG002
        """See trajectory_service.proto."""
        wanted = values.filter_of(request.filter)
        fields = Fields()
        dimension = values.dimension_of(fields, request.group_by, request.label)
        fields.check(len(request.ks) <= 10, "ks", "must be at most 10")
        for position, k in enumerate(request.ks):
            fields.between(f"ks[{position}]", k, 1, 1000, zero=False)
        fields.done()
        rows = await self._trajectories.stats(principal().tenant, wanted, dimension, request.label, request.ks)
        return pb.GetStatsResponse(rows=map(values.stats_message, rows))

    async def PutBlob(  # noqa: N802
        self,
        requests: AsyncIterator[pb.PutBlobRequest],
        context: Any,  # noqa: ARG002
    ) -> pb.PutBlobResponse:
        """See trajectory_service.proto."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("part") != "blob":
            raise InvalidArgumentError.of("blob", "the first message says what follows")
        fields = Fields()
        fields.text("blob.media_type", first.blob.media_type, maximum=256)
        fields.done()
        wanted = BlobReference(first.blob.sha256, first.blob.size, first.blob.media_type)
        stored = await self._bodies.put(principal().tenant, wanted, _uploaded(requests, ended=first.end))
        return pb.PutBlobResponse(
            blob=trajectory_pb2.BlobReference(sha256=stored.sha256, size=stored.size, media_type=stored.media_type)
        )

    async def GetBlob(  # noqa: N802
        self,
        request: pb.GetBlobRequest,
        context: Any,  # noqa: ARG002
    ) -> AsyncIterator[pb.GetBlobResponse]:
        """See trajectory_service.proto."""
        fields = Fields()
        values.check_sha256(fields, "sha256", request.sha256)
        fields.check(request.offset >= 0, "offset", "must not be negative")
        fields.done()
        async for data in self._bodies.get(principal().tenant, request.sha256, request.offset):
            for start in range(0, len(data), 1 << 20):
                yield pb.GetBlobResponse(data=data[start : start + (1 << 20)])


async def _uploaded(requests: AsyncIterator[pb.PutBlobRequest], *, ended: bool) -> AsyncIterator[bytes]:
    async for request in requests:
        if ended or request.WhichOneof("part") == "blob":
            raise InvalidArgumentError.of("data", "every message after the first has data, and none follows the end")
        yield request.data
        ended = request.end
    if not ended:
        raise InvalidArgumentError.of("end", "the stream was cut before its end; nothing is stored")


def _append_start(request: pb.AppendStepsRequest) -> pb.AppendStart:
    if request.WhichOneof("part") != "start":
        raise InvalidArgumentError.of("start", "the first message says which trajectory")
    fields = Fields()
    values.check_id(fields, "start.trajectory_id", request.start.trajectory_id)
    fields.token_id("start.writer", request.start.writer)
    fields.done()
    return request.start


def _position(token: str, order: Order, ascending: bool) -> tuple[bool, Any, int]:
    kind: type = {Order.CREATED: str, Order.OUTCOME: float, Order.COST: float}.get(order, int)
    try:
        named, was_ascending, without_value, value, key = decode_token(
            "page_token", token, (str, bool, bool, kind, int)
        )
    except InvalidArgumentError:
        named, was_ascending, without_value, value, key = decode_token(
            "page_token", token, (str, bool, bool, type(None), int)
        )
    if (named, was_ascending) != (order.name, ascending) or (value is None and not without_value):
        raise bad_token("page_token")
    if order is Order.CREATED:
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise bad_token("page_token") from None
    return without_value, value, key


def _check_id(trajectory_id: str) -> None:
    fields = Fields()
    values.check_id(fields, "trajectory_id", trajectory_id)
    fields.done()


def _serialized(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
