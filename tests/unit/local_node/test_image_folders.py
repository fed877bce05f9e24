"""Images that are removed while the same content is imported again, and those that a daemon before this one left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from services.local.runtime.images import ImageStore
from services.local.runtime.removal import remove_tree
from services.local.runtime.setup import Machine

_DIGEST = "a" * 64


class GivenContent(ImageStore):
    """Every import has the same content."""

    async def _work(self, source: Path, target: Path) -> AsyncGenerator[dict[str, Any], None]:
        yield {"digest": _DIGEST}
        if self.by_digest(_DIGEST) is None:
            (target / "root").mkdir(parents=True)
            (target / "root" / "file").write_bytes(source.read_bytes())
            yield {"image": {"size": 1, "env": {}, "working_directory": "/", "user": ""}}


class SlowRemoval:
    """Removes a folder when it is told to go on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def __call__(self, folder: Path) -> None:
        self.begun.set()
        await self.go_on.wait()
        remove_tree(folder)


async def test_content_is_imported_again_while_it_is_removed(tmp_path: Path) -> None:
    images, source = tmp_path / "images", tmp_path / "source"
    images.mkdir()
    source.write_bytes(b"content")
    machine = SimpleNamespace(images=images, data=tmp_path / "data", image_folder=lambda digest: images / digest)
    removal = SlowRemoval()
    store = GivenContent(cast("Machine", machine), removal)

    async def imported() -> None:
        async for _ in store.imported("one", source, set, replace=False):
            pass

    async with asyncio.timeout(110):
        await imported()
        removing = asyncio.create_task(store.remove("one", set()))
        await removal.begun.wait()
        await imported()
        removal.go_on.set()
        await removing
    assert (images / _DIGEST / "root" / "file").read_bytes() == b"content"
    assert store.find("one") is not None
    assert {path.name for path in images.iterdir()} == {"names", _DIGEST}


async def test_images_that_sandboxes_use_are_there_after_a_restart_whatever_else_was_left(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    in_use = [f"{number:064x}" for number in range(5)]
    for folder in (*in_use, f"{99:064x}", ".new-cut-off", ".gone-half"):
        (images / folder).mkdir()
        image = {"name": "replaced", "digest": folder, "size": 1, "import_time": 0.0, "env": {}}
        (images / folder / "image.json").write_text(json.dumps({**image, "working_directory": "/", "user": ""}))

    async def remove(folder: Path) -> None:
        remove_tree(folder)

    machine = SimpleNamespace(images=images, data=tmp_path / "data", image_folder=lambda digest: images / digest)
    store = ImageStore(cast("Machine", machine), remove)
    await store.load(digest for digest in in_use)  # as they are read: once
    assert {path.name for path in images.iterdir()} == {"names", *in_use}
    for digest in in_use:
        found = store.by_digest(digest)
        assert found is not None and found.digest == digest
