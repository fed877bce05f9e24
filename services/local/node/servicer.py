"""NodeService: proto to domain and back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

from orchard.node.v1 import node_pb2, node_service_pb2, node_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common.validation import Fields
from services.local.node.model import Record
from services.local.node.service import Creation, Node, Told
from services.local.runtime.model import Image, Request, Resources

_HOST: Final = sandbox_pb2.NETWORK_MODE_HOST
_MODES: Final = (sandbox_pb2.NETWORK_MODE_UNSPECIFIED, sandbox_pb2.NETWORK_MODE_NONE, _HOST)


class NodeServicer(node_service_pb2_grpc.NodeServiceServicer):
    """See protos/orchard/node/v1/node_service.proto."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def CreateSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        _check_create(request)
        if request.validate_only:
            self._node.check_image(request.spec.image)
            return node_service_pb2.CreateSandboxResponse()
        record = await self._node.create(_creation(request))
        return node_service_pb2.CreateSandboxResponse(sandbox=_to_proto(record))

    async def DeleteSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        _check_uid(request.uid)
        await self._node.delete(request.uid)
        return node_service_pb2.DeleteSandboxResponse()

    async def UpdateSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        _check_uid(request.uid)
        record = self._node.update(request.uid, _seconds(request.expire_time))
        return node_service_pb2.UpdateSandboxResponse(sandbox=_to_proto(record))

    async def WatchSandboxes(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        """See the proto."""
        async with aclosing(self._node.watch()) as batches:
            async for told in batches:
                for event in _events(told):
                    yield event

    async def ImportImage(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802, ARG002
        """See the proto."""
        fields = Fields()
        fields.path("source_path", request.source_path)
        fields.done()
        source = Path(request.source_path)
        async with aclosing(self._node.import_image(request.name, source, replace=request.replace)) as steps:
            async for step in steps:
                yield node_service_pb2.ImportImageResponse(
                    done_bytes=step.done_bytes,
                    total_bytes=step.total_bytes,
                    image=None if step.image is None else _image_to_proto(step.image),
                )

    async def ListImages(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        fields = Fields()
        size = fields.page_size("page_size", request.page_size, default=100, maximum=1000)
        fields.text("page_token", request.page_token, maximum=255)
        fields.done()
        images = self._node.list_images(request.page_token, size + 1)
        more = len(images) > size
        return node_service_pb2.ListImagesResponse(
            images=[_image_to_proto(image) for image in images[:size]],
            next_page_token=images[size - 1].name if more else "",
        )

    async def RemoveImage(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        fields = Fields()
        fields.text("name", request.name, maximum=255, required=True)
        fields.done()
        await self._node.remove_image(request.name)
        return node_service_pb2.RemoveImageResponse()

    async def GetNode(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        abilities = self._node.abilities()
        return node_service_pb2.GetNodeResponse(
            user_ids=abilities.user_ids,
            limits=abilities.limits,
            gaps=abilities.gaps,
            running_sandboxes=self._node.running,
        )


def _events(told: Told) -> list[Any]:
    response = node_service_pb2.WatchSandboxesResponse
    events = [response(sandbox=_to_proto(record)) for record in told.records]
    if told.snapshot:
        events.append(response(synced=node_service_pb2.Synced()))
    elif not events:
        events.append(response(bookmark=node_service_pb2.Bookmark()))
    events[-1].complete_revision = told.revision
    return events


def _check_uid(uid: str) -> None:
    fields = Fields()
    fields.text("uid", uid, maximum=64, required=True)
    fields.done()


def _check_create(request: Any) -> None:
    fields = Fields()
    fields.text("tenant", request.tenant, maximum=64, required=True)
    fields.sandbox_id("sandbox_id", request.sandbox_id)
    fields.text("request_id", request.request_id, maximum=64, required=not request.validate_only)
    spec = request.spec
    fields.text("spec.image", spec.image, maximum=512)
    fields.env("spec.env", spec.env)
    fields.text("spec.working_directory", spec.working_directory, maximum=4096)
    fields.check(
        not spec.working_directory or spec.working_directory.startswith("/"),
        "spec.working_directory",
        "must be absolute",
    )
    fields.text("spec.user", spec.user, maximum=256)
    fields.check(
        spec.network.mode in _MODES,
        "spec.network.mode",
        "the process runtime knows NONE and HOST only; use one of them, or a cluster for the others",
    )
    resources = spec.resources
    fields.check(resources.gpu == 0, "spec.resources.gpu", "the process runtime gives no GPUs; use a cluster")
    fields.check(
        resources.disk_bytes == 0,
        "spec.resources.disk_bytes",
        "the process runtime cannot limit disk; leave it out, or use a cluster",
    )
    for name in ("image_pull_secret", "node_selector", "runtime_class"):
        fields.check(not getattr(spec, name), f"spec.{name}", "is for clusters; leave it out")
    fields.between("spec.resources.cpu", resources.cpu, 0.1, 256)
    fields.between("spec.resources.memory_bytes", resources.memory_bytes, 16 << 20, 4 << 40)
    fields.between("spec.resources.shm_bytes", resources.shm_bytes, 64 << 10, 1 << 40)
    fields.between("spec.resources.pids", resources.pids, 16, 4_194_304)
    fields.done()


def _creation(request: Any) -> Creation:
    spec = request.spec
    resources = spec.resources
    wanted = Request(
        uid="",
        sandbox_id=request.sandbox_id,
        image=spec.image,
        env=dict(spec.env),
        working_directory=spec.working_directory,
        user=spec.user,
        start_argv=tuple(spec.start_argv),
        expects_secret_env=request.expects_secret_env,
        host_network=spec.network.mode == _HOST,
        resources=Resources(
            cpu=resources.cpu,
            memory_bytes=resources.memory_bytes,
            disk_bytes=resources.disk_bytes,
            shm_bytes=resources.shm_bytes,
            pids=resources.pids,
            gpu=resources.gpu,
        ),
    )
    return Creation(
        tenant=request.tenant,
        request_id=request.request_id,
        spec_hash=request.spec_hash,
        spec=spec.SerializeToString(),
        request=wanted,
        expire_time=_seconds(request.expire_time),
        create_time=_seconds(request.create_time),
    )


def _image_to_proto(image: Image) -> Any:
    message = node_pb2.NodeImage(
        name=image.name,
        digest=image.digest,
        size=image.size,
        env=image.env,
        working_directory=image.working_directory,
        user=image.user,
    )
    message.import_time.FromNanoseconds(int(image.import_time * 1e9))
    return message


def _seconds(timestamp: Any) -> float:
    return float(timestamp.seconds + timestamp.nanos / 1e9)


def _to_proto(record: Record) -> Any:
    sandbox = node_pb2.NodeSandbox(
        uid=record.uid,
        tenant=record.tenant,
        sandbox_id=record.request.sandbox_id,
        request_id=record.request_id,
        spec_hash=record.spec_hash,
        spec=sandbox_pb2.SandboxSpec.FromString(record.spec),
        phase=node_pb2.NodeSandboxPhase.Value(f"NODE_SANDBOX_PHASE_{record.phase.value}"),
        reason=sandbox_pb2.SandboxReason.Value(
            f"SANDBOX_REASON_{'UNSPECIFIED' if record.reason is None else record.reason.value}"
        ),
        message=record.message,
        endpoint=record.endpoint,
        revision=record.revision,
        expects_secret_env=record.request.expects_secret_env,
    )
    sandbox.create_time.FromMilliseconds(round(record.create_time * 1e3))
    if record.expire_time:
        sandbox.expire_time.FromMilliseconds(round(record.expire_time * 1e3))
    return sandbox
