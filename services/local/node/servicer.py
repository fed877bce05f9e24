"""NodeService: proto to domain and back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from orchard.node.v1 import node_pb2, node_service_pb2, node_service_pb2_grpc
from orchard.sandbox.v1 import sandbox_pb2

from services.common import pods
from services.common.times import to_ms, to_timestamp
from services.common.validation import Fields, seconds_of
from services.local.node.model import Creation, Record
from services.local.node.service import Node, Told
from services.local.runtime.model import Image, Request, Resources

_HOST: Final = sandbox_pb2.NETWORK_MODE_HOST
_OPEN: Final = sandbox_pb2.NETWORK_MODE_OPEN
_CLOSED: Final = (sandbox_pb2.NETWORK_MODE_UNSPECIFIED, sandbox_pb2.NETWORK_MODE_NONE)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a runtime of one machine makes of a spec.

    Attributes:
        runtime: its name.
        network_mode: the mode beside NONE that it knows.
        network_name: its name.
        image_fault: what is wrong with the name of an image; None: nothing.
        least_memory_bytes: of a limit.
        annotated: sandboxes carry what their records are rebuilt from.
    """

    runtime: str
    network_mode: int
    network_name: str
    image_fault: Callable[[str], str | None]
    least_memory_bytes: int
    annotated: bool


PROCESS: Final = Offer("process", _HOST, "HOST", lambda _: None, 16 << 20, annotated=False)


def docker_offer(is_reference: Callable[[str], bool]) -> Offer:
    """Of the docker runtime; `is_reference` tells names of images from other text."""

    def fault(image: str) -> str | None:
        if not image:
            return "is required with the docker runtime: name an image, such as python:3.12"
        if not is_reference(image):
            return "must be an image's name like python:3.12 or registry.example/team/image@sha256:..., or its id"
        return None

    # The agent's own share is within the limit there.
    return Offer("docker", _OPEN, "OPEN", fault, 64 << 20, annotated=True)


class NodeServicer(node_service_pb2_grpc.NodeServiceServicer):
    """See protos/orchard/node/v1/node_service.proto."""

    def __init__(self, node: Node, offer: Offer = PROCESS) -> None:
        self._node = node
        self._offer = offer

    async def CreateSandbox(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        """See the proto."""
        _check_create(request, self._offer)
        if request.validate_only:
            self._node.check_image(request.spec.image)
            return node_service_pb2.CreateSandboxResponse()
        record = await self._node.create(_creation(request, annotated=self._offer.annotated))
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


def _check_create(request: Any, offer: Offer) -> None:
    fields = Fields()
    fields.text("tenant", request.tenant, maximum=64, required=True)
    fields.sandbox_id("sandbox_id", request.sandbox_id)
    fields.text("request_id", request.request_id, maximum=64, required=not request.validate_only)
    spec = request.spec
    fields.text("spec.image", spec.image, maximum=512)
    fault = offer.image_fault(spec.image)
    fields.check(fault is None, "spec.image", fault or "")
    fields.env("spec.env", spec.env)
    if spec.start_argv:
        fields.arguments("spec.start_argv", spec.start_argv)
    fields.text("spec.working_directory", spec.working_directory, maximum=4096)
    fields.check(
        not spec.working_directory or spec.working_directory.startswith("/"),
        "spec.working_directory",
        "must be absolute",
    )
    fields.text("spec.user", spec.user, maximum=256)
    fields.check(
        spec.network.mode in (*_CLOSED, offer.network_mode),
        "spec.network.mode",
        f"the {offer.runtime} runtime knows NONE and {offer.network_name} only; use one of them, or a cluster for the "
        "others",
    )
    resources = spec.resources
    fields.check(resources.gpu == 0, "spec.resources.gpu", f"the {offer.runtime} runtime gives no GPUs; use a cluster")
    fields.check(
        resources.disk_bytes == 0,
        "spec.resources.disk_bytes",
        f"the {offer.runtime} runtime cannot limit disk; leave it out, or use a cluster",
    )
    for name in ("image_pull_secret", "node_selector", "runtime_class"):
        fields.check(not getattr(spec, name), f"spec.{name}", "is for clusters; leave it out")
    fields.between("spec.resources.cpu", resources.cpu, 0.1, 256)
    fields.between("spec.resources.memory_bytes", resources.memory_bytes, offer.least_memory_bytes, 4 << 40)
    fields.between("spec.resources.shm_bytes", resources.shm_bytes, 64 << 10, 1 << 40)
    fields.between("spec.resources.pids", resources.pids, 16, 4_194_304)
    fields.done()


def rebuilt(annotations: Mapping[str, str]) -> Creation:
    """The create of a sandbox that is there, from what it says of itself (services.common.pods).

    Raises:
        ValueError: it does not say enough.
    """
    try:
        request = node_service_pb2.CreateSandboxRequest(
            tenant=annotations[pods.TENANT],
            sandbox_id=annotations[pods.SANDBOX_ID],
            request_id=annotations[pods.REQUEST_ID],
            spec_hash=annotations[pods.SPEC_HASH],
            spec=pods.spec_of(annotations[pods.SPEC]),
            expects_secret_env=annotations[pods.EXPECTS_SECRET_ENV] == "1",
            create_time=to_timestamp(int(annotations[pods.CREATE_MS])),
            expire_time=to_timestamp(int(annotations[pods.EXPIRE_MS])),
        )
    except KeyError as error:
        raise ValueError(f"there is no {error.args[0]}") from None
    return _creation(request, annotated=True)


def _annotations(request: Any) -> dict[str, str]:
    return {
        pods.TENANT: request.tenant,
        pods.SANDBOX_ID: request.sandbox_id,
        pods.REQUEST_ID: request.request_id,
        pods.SPEC_HASH: request.spec_hash,
        pods.SPEC: pods.encode_spec(request.spec.SerializeToString(deterministic=True)),
        pods.CREATE_MS: str(to_ms(request.create_time)),
        pods.EXPIRE_MS: str(to_ms(request.expire_time)),
        pods.EXPECTS_SECRET_ENV: str(int(request.expects_secret_env)),
    }


def _creation(request: Any, *, annotated: bool) -> Creation:
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
        open_network=spec.network.mode == _OPEN,
        start_seconds=seconds_of(spec.start_timeout) or 60.0,
        pull_seconds=seconds_of(spec.pull_timeout) or 900.0,
        annotations=_annotations(request) if annotated else {},
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
