"""Calls the gateway's ImageService, as the user of the connection profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

import grpc
from grpc_status import rpc_status
from orchard.admin.v1 import admin_pb2, image_service_pb2, image_service_pb2_grpc

from services.common.server import CHANNEL_OPTIONS
from services.local.supervisor.profile import Profile

_CALL_SECONDS: Final = 60.0
_PAGE_SIZE: Final = 1000


class ImageError(Exception):
    """The call failed; the message is the platform's, for a person."""


@dataclass(frozen=True, slots=True)
class Image:
    """An imported root file system."""

    name: str
    digest: str
    size: int
    import_time: datetime

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.name,
            "digest": self.digest,
            "size": self.size,
            "import_time": self.import_time.isoformat().replace("+00:00", "Z"),
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """Bytes read so far and in all (zero if unknown); the image at the end."""

    done: int
    total: int
    image: Image | None


class ImagesClient:
    """Use as a context manager."""

    def __init__(self, profile: Profile) -> None:
        self._endpoint = profile.endpoint
        self._metadata = (("authorization", f"Bearer {profile.api_key}"),)
        self._channel = grpc.insecure_channel(profile.endpoint, options=CHANNEL_OPTIONS)
        self._stub = image_service_pb2_grpc.ImageServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._channel.close()

    def import_image(self, name: str, source_path: str, *, replace: bool) -> Iterator[Progress]:
        """Import an archive or folder of the platform's machine.

        Raises:
            ImageError: it cannot be imported.
        """
        request = image_service_pb2.ImportImageRequest(name=name, source_path=source_path, replace=replace)
        call = self._stub.ImportImage(request, metadata=self._metadata)
        try:
            for message in call:
                image = _image(message.image) if message.HasField("image") else None
                yield Progress(message.done_bytes, message.total_bytes, image)
        except grpc.RpcError as error:
            raise self._error(error) from None
        finally:
            call.cancel()

    def list_images(self) -> list[Image]:
        """All images, by name.

        Raises:
            ImageError: the call failed.
        """
        found: list[Image] = []
        request = image_service_pb2.ListImagesRequest(page_size=_PAGE_SIZE)
        while True:
            try:
                page = self._stub.ListImages(request, metadata=self._metadata, timeout=_CALL_SECONDS)
            except grpc.RpcError as error:
                raise self._error(error) from None
            found += [_image(image) for image in page.images]
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def remove_image(self, name: str) -> None:
        """Remove an image.

        Raises:
            ImageError: there is none, or sandboxes use it.
        """
        request = image_service_pb2.RemoveImageRequest(name=name)
        try:
            self._stub.RemoveImage(request, metadata=self._metadata, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            raise self._error(error) from None

    def _error(self, error: grpc.RpcError) -> ImageError:
        if not isinstance(error, grpc.Call):
            return ImageError(str(error))
        if error.code() == grpc.StatusCode.UNAVAILABLE and rpc_status.from_call(error) is None:
            return ImageError(f"nothing answers at {self._endpoint}: is `orchard up` running?")
        return ImageError(error.details() or error.code().name)


def _image(image: admin_pb2.Image) -> Image:
    return Image(image.name, image.digest, image.size, image.import_time.ToDatetime(tzinfo=UTC))
