"""Imported images: unpacked under images/DIGEST, named by small files under images/names."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from services.common.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from services.common.logs import get_logger
from services.local.runtime.identity import kill
from services.local.runtime.importer import Order
from services.local.runtime.model import Image
from services.local.runtime.setup import Machine

_log = get_logger(__name__)
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._/:@-]{0,254}\Z")
_LINE_BYTES: Final = 1 << 20
Remove = Callable[[Path], Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an import is; `image` is set at its end."""

    done_bytes: int
    total_bytes: int
    image: Image | None = None


class ImageStore:
    """See services.local.node.service.Images."""

    def __init__(self, machine: Machine, remove: Remove) -> None:
        self._machine = machine
        self._remove = remove
        self._names = machine.images / "names"
        self._names.mkdir(exist_ok=True)
        self._by_name: dict[str, Image] = {}
        # Replaced or removed while sandboxes used them.
        self._retired: dict[str, Image] = {}
        # One import at a time: they are bound by the disk.
        self._importing = asyncio.Lock()

    async def load(self, used: Iterable[str]) -> None:
        """Read what is there; remove what an import that was cut off left, and what nobody names or uses any more."""
        for path in self._names.glob("*.json"):
            image = Image(**json.loads(path.read_text(encoding="utf-8")))
            self._by_name[image.name] = image
        kept, in_use = {image.digest for image in self._by_name.values()}, set(used)
        for path in self._machine.images.iterdir():
            if path.name == "names" or path.name in kept:
                continue
            if path.name in in_use and (path / "image.json").exists():
                self._retired[path.name] = Image(**json.loads((path / "image.json").read_text(encoding="utf-8")))
            else:
                await self._remove(path)

    def find(self, name: str) -> Image | None:
        """By name."""
        return self._by_name.get(name)

    def by_digest(self, digest: str) -> Image | None:
        """By digest, also one that was replaced and is still in use."""
        found = (image for image in self._by_name.values() if image.digest == digest)
        return next(found, None) or self._retired.get(digest)

    def page(self, after: str, count: int) -> list[Image]:
        """Up to `count` images whose names come after `after`."""
        return [self._by_name[name] for name in sorted(self._by_name) if name > after][:count]

    async def remove(self, name: str, used: set[str]) -> None:
        """Remove an image.

        Raises:
            NotFoundError: no image has that name.
            FailedPreconditionError: sandboxes use it.
        """
        image = self._by_name.get(name)
        if image is None:
            raise NotFoundError(f"no image is called {name!r}", reason="IMAGE_NOT_FOUND", image=name)
        if image.digest in used and not self._has_other_name(image):
            raise FailedPreconditionError(
                f"sandboxes use image {name!r}; delete them first", reason="IMAGE_IN_USE", image=name
            )
        del self._by_name[name]
        self._name_file(name).unlink(missing_ok=True)
        await self._drop(image, used)

    async def unused(self, digest: str, still_used: Iterable[str]) -> None:
        """A sandbox that used it is gone: remove an image that was replaced meanwhile."""
        image = self._retired.get(digest)
        if image is not None and digest not in set(still_used):
            del self._retired[digest]
            await self._discard(digest)

    async def imported(
        self, name: str, source: Path, used: Callable[[], set[str]], *, replace: bool
    ) -> AsyncGenerator[Progress, None]:
        """Import an image; yields progress, at last with the image.

        Raises:
            InvalidArgumentError: the name is none, or the source is no image.
            NotFoundError: there is no such source.
            AlreadyExistsError: the name is taken.
            ResourceExhaustedError: no space.
        """
        self._check(name, source, replace=replace)
        async with self._importing:
            self._check(name, source, replace=replace)
            temporary = self._machine.images / f".new-{uuid.uuid4().hex[:12]}"
            try:
                digest = ""
                values: dict[str, Any] = {}
                async with aclosing(self._work(source, temporary)) as steps:
                    async for step in steps:
                        if "done" in step:
                            yield Progress(step["done"], step["total"])
                        digest = step.get("digest", digest)
                        values = step.get("image", values)
                image = self._keep(name, digest, values, temporary)
            finally:
                if temporary.exists():
                    await self._remove(temporary)
            old = self._by_name.get(name)
            self._by_name[name] = image
            self._write_name(image)
            if old is not None and old.digest != digest:
                await self._drop(old, used())
        yield Progress(0, 0, image)

    def _check(self, name: str, source: Path, *, replace: bool) -> None:
        if not _NAME.match(name):
            raise InvalidArgumentError.of(
                "name", "must be 1 to 255 of a-z, 0-9, '.', '_', '-', '/', ':', '@', beginning with a letter or digit"
            )
        if not source.is_absolute():
            raise InvalidArgumentError.of("source_path", "must be absolute: it is read by the node daemon")
        if not source.exists():
            raise NotFoundError(f"{source} does not exist on this machine", reason="PATH_NOT_FOUND", path=source)
        if not (source.is_file() or source.is_dir()):
            raise InvalidArgumentError.of("source_path", "must be an archive or a folder")
        if self._machine.data.is_relative_to(source.resolve()):
            raise InvalidArgumentError.of(
                "source_path", "the folder holds the platform's own data: choose a root folder"
            )
        if name in self._by_name and not replace:
            raise AlreadyExistsError(
                f"an image is called {name!r}; set replace to put another in its place",
                reason="IMAGE_EXISTS",
                image=name,
            )

    async def _work(self, source: Path, target: Path) -> AsyncGenerator[dict[str, Any], None]:
        """Compute the digest, then unpack unless that is there."""
        digest = ""
        for _ in range(2):
            order = Order(str(source), str(target), digest, self._machine.ids)
            async with aclosing(self._run(order)) as lines:
                async for line in lines:
                    digest = line.get("digest", digest)
                    yield line
            if self.by_digest(digest) is not None:
                return

    async def _run(self, order: Order) -> AsyncGenerator[dict[str, Any], None]:
        read, write = os.pipe()
        given = os.memfd_create("order")
        os.write(given, order.to_json())
        os.lseek(given, 0, os.SEEK_SET)
        actions = [(os.POSIX_SPAWN_DUP2, given, 0), (os.POSIX_SPAWN_DUP2, write, 1)]
        arguments = [sys.executable, "-m", "services.local.runtime.importer"]
        pid = os.posix_spawn(sys.executable, arguments, dict(os.environ), file_actions=actions)  # noqa: ASYNC221
        pidfd = os.pidfd_open(pid)
        for descriptor in (write, given):
            os.close(descriptor)
        try:
            reader = asyncio.StreamReader(limit=_LINE_BYTES)
            protocol = asyncio.StreamReaderProtocol(reader)
            pipe = os.fdopen(read, "rb", buffering=0)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
            try:
                ended = False
                async for line in reader:
                    values = json.loads(line)
                    if "error" in values:
                        raise _import_error(values)
                    ended = ended or "image" in values or "digest" in values
                    yield values
            finally:
                transport.close()
            if not ended:
                raise InvalidArgumentError.of("source_path", "the import ended without a word; the log has more")
        finally:
            kill(pidfd)
            os.close(pidfd)

    def _keep(self, name: str, digest: str, values: dict[str, Any], temporary: Path) -> Image:
        known = self.by_digest(digest)
        if known is not None:
            self._retired.pop(digest, None)
            return Image(**{**asdict(known), "name": name, "import_time": time.time()})
        image = Image(name=name, digest=digest, import_time=time.time(), **values)
        (temporary / "image.json").write_text(json.dumps(asdict(image)), encoding="utf-8")
        temporary.rename(self._machine.image_folder(digest))
        return image

    async def _drop(self, image: Image, used: set[str]) -> None:
        if self._has_other_name(image):
            return
        if image.digest in used:
            self._retired[image.digest] = image
        else:
            await self._discard(image.digest)

    async def _discard(self, digest: str) -> None:
        # Its place is free at once: the same content may be imported again while it is removed, or where it cannot be.
        gone = self._machine.images / f".gone-{uuid.uuid4().hex[:12]}"
        with suppress(FileNotFoundError):
            self._machine.image_folder(digest).rename(gone)
            await self._remove(gone)

    def _has_other_name(self, image: Image) -> bool:
        return any(i.digest == image.digest and i.name != image.name for i in self._by_name.values())

    def _name_file(self, name: str) -> Path:
        # A name has slashes and may be as long as a file's name may be.
        return self._names / f"{hashlib.sha256(name.encode()).hexdigest()}.json"

    def _write_name(self, image: Image) -> None:
        path = self._name_file(image.name)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(image)), encoding="utf-8")
        temporary.rename(path)


def _import_error(values: dict[str, Any]) -> Exception:
    if values["kind"] == "space":
        return ResourceExhaustedError(f"no space for the image: {values['error']}", reason="NO_SPACE")
    return InvalidArgumentError.of("source_path", f"is no image: {values['error']}", reason="NOT_AN_IMAGE")
