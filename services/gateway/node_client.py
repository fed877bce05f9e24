"""ImageService of a one-machine platform: passed to its node daemon, which speaks of the same images."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from orchard.admin.v1 import admin_pb2, image_service_pb2, image_service_pb2_grpc
from orchard.node.v1 import node_pb2, node_service_pb2, node_service_pb2_grpc

from services.common.channel import connect
from services.common.errors import UnimplementedError
from services.common.interceptor import note_target


class NodeImages(image_service_pb2_grpc.ImageServiceServicer):
    """Serves orchard.admin.v1.ImageService; the authenticator has checked the role."""

    def __init__(self, address: str) -> None:
        self._channel = connect(address) if address else None
        self._stub = node_service_pb2_grpc.NodeServiceStub(self._channel) if self._channel else None

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    def _node(self) -> Any:
        if self._stub is None:
            raise UnimplementedError("images come from a registry here; there is nothing to import", reason="NO_IMAGES")
        return self._stub

    async def ImportImage(  # noqa: N802 (gRPC's names, here and below)
        self, request: image_service_pb2.ImportImageRequest, context: Any
    ) -> AsyncIterator[image_service_pb2.ImportImageResponse]:
        """See image_service.proto."""
        note_target(request.name)
        call = self._node().ImportImage(
            node_service_pb2.ImportImageRequest(
                name=request.name, source_path=request.source_path, replace=request.replace
            ),
            timeout=context.time_remaining(),
        )
        try:
            async for progress in call:
                yield image_service_pb2.ImportImageResponse(
                    done_bytes=progress.done_bytes,
                    total_bytes=progress.total_bytes,
                    image=_image(progress.image) if progress.HasField("image") else None,
                )
        finally:
            call.cancel()

    async def ListImages(  # noqa: N802
        self, request: image_service_pb2.ListImagesRequest, context: Any
    ) -> image_service_pb2.ListImagesResponse:
        """See image_service.proto."""
        page = await self._node().ListImages(
            node_service_pb2.ListImagesRequest(page_size=request.page_size, page_token=request.page_token),
            timeout=context.time_remaining(),
        )
        return image_service_pb2.ListImagesResponse(
            images=[_image(image) for image in page.images], next_page_token=page.next_page_token
        )

    async def RemoveImage(  # noqa: N802
        self, request: image_service_pb2.RemoveImageRequest, context: Any
    ) -> image_service_pb2.RemoveImageResponse:
        """See image_service.proto."""
        note_target(request.name)
        await self._node().RemoveImage(
            node_service_pb2.RemoveImageRequest(name=request.name), timeout=context.time_remaining()
        )
        return image_service_pb2.RemoveImageResponse()


def _image(image: node_pb2.NodeImage) -> admin_pb2.Image:
    return admin_pb2.Image(name=image.name, digest=image.digest, size=image.size, import_time=image.import_time)
