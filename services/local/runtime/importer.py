"""Imports one image: a process of its own, so that a heavy import slows no sandbox down and can be ended at any moment.

    python -m services.local.runtime.importer < ORDER

The order is JSON on standard input; progress and the end are JSON lines on standard output.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from services.local.runtime import archive
from services.local.runtime.archive import ArchiveFiles, Description, Files, FolderFiles
from services.local.runtime.layers import LayerError, Owners, Unpacker
from services.local.runtime.mapped import run_mapped
from services.local.runtime.plan import Ids
from services.local.runtime.rootfs import HOST_NAME

_BUFFER: Final = 1 << 20
_STEP: Final = 4 << 20
_ROOT_FOLDERS: Final = ("bin", "etc", "usr", "lib", "sbin", "opt", "app")


@dataclass(frozen=True, slots=True)
class Order:
    """What to import and where to.

    Attributes:
        source: archive or folder.
        target: a new folder; gets root/ and base/.
        digest: of the source, if it has been computed; else only that is done.
        ids: the id maps of sandboxes.
    """

    source: str
    target: str
    digest: str
    ids: Ids

    def to_json(self) -> bytes:
        """As bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Order:
        """From bytes."""
        values = json.loads(data)
        values["ids"] = Ids.from_values(values["ids"])
        return cls(**values)


class Progress:
    """Tells of bytes read, not too often."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._told = -_STEP
        self.done = 0

    def add(self, count: int) -> None:
        """So many more."""
        self.done += count
        if self.done - self._told >= _STEP:
            self._told = self.done
            _tell({"done": self.done, "total": self._total})


class _Counting:
    """A file that tells how much of it has been read."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None]) -> None:
        self._file = file
        self._told = told

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._told(len(data))
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return self._file.seekable()


def digest_of(source: Path) -> str:
    """SHA-256 of an archive, or of a folder's listing: names, modes, owners, sizes and times."""
    digest = hashlib.sha256()
    if source.is_dir():
        for parent, names, files in os.walk(source):
            names.sort()
            for name in sorted((*names, *files)):
                path = os.path.join(parent, name)  # noqa: PTH118
                info = os.lstat(path)
                what = (os.path.relpath(path, source), info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns)
                size = 0 if os.path.isdir(path) else info.st_size  # noqa: PTH112
                digest.update(repr((*what, size)).encode(errors="surrogateescape"))
        return digest.hexdigest()
    progress = Progress(source.stat().st_size * 2)
    with source.open("rb") as file:
        while data := file.read(_BUFFER):
            digest.update(data)
            progress.add(len(data))
    return digest.hexdigest()


def unpack(order: Order) -> dict[str, Any]:
    """Unpack into the target; returns what is to be known of the image.

    Raises:
        LayerError: it is no image.
        OSError: it cannot be read or written.
    """
    target = Path(order.target)
    target.mkdir(mode=0o755)
    root = target / "root"
    root.mkdir(mode=0o755)
    ids = order.ids
    owners = Owners(change=ids.switchable, shift=ids.owner if ids.privileged else 0)
    if owners.change:
        os.chown(root, owners.of(0), owners.of(0))
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    unpacker = Unpacker(descriptor, owners)
    description = _fill(Path(order.source), unpacker, target)
    if not any(root.iterdir()):
        raise LayerError("it holds no files")
    _make_base(target / "base", root, owners)
    return {
        "size": unpacker.size,
        "env": dict(description.env),
        "working_directory": description.working_directory,
        "user": description.user,
    }


def _fill(source: Path, unpacker: Unpacker, target: Path) -> Description:
    if source.is_dir():
        files = FolderFiles(source)
        description = archive.describe(files)
        if description is not None:
            _unpack_layers(files, description, unpacker, Progress(0))
            return description
        if not any((source / name).exists() for name in _ROOT_FOLDERS):
            raise LayerError(f"the folder is no root: it has none of {', '.join(_ROOT_FOLDERS)}")
        progress = Progress(0)
        unpacker.copy(str(source), lambda size: progress.add(size - progress.done))
        return Description(())
    size = source.stat().st_size
    progress = Progress(size * 2)
    progress.done = size
    with source.open("rb") as file, archive.decompressed(cast("BinaryIO", _Counting(file, progress.add))) as plain:
        if archive.compression(_start(source)):
            # Layers are read in another order than they are stored in: that needs a plain file.
            copy = target / "archive.tar"
            with copy.open("wb") as out:
                shutil.copyfileobj(plain, out, _BUFFER)
            try:
                return _fill_from_tar(copy, unpacker, Progress(0))
            finally:
                copy.unlink()
        return _fill_from_tar(source, unpacker, progress)


def _fill_from_tar(path: Path, unpacker: Unpacker, progress: Progress) -> Description:
    try:
        with tarfile.open(path, "r:") as tar:
            files = ArchiveFiles(tar)
            description = archive.describe(files)
            if description is not None:
                _unpack_layers(files, description, unpacker, progress)
                return description
    except tarfile.TarError as error:
        raise LayerError(f"it is no image archive: {error}") from None
    with path.open("rb") as file:
        unpacker.unpack(cast("BinaryIO", _Counting(file, progress.add)))
    return Description(())


def _unpack_layers(files: Files, description: Description, unpacker: Unpacker, progress: Progress) -> None:
    for layer in description.layers:
        with files.open(layer) as file:
            counted = cast("BinaryIO", _Counting(file, progress.add))
            with archive.decompressed(counted) as plain:
                unpacker.unpack(plain)


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(8)


def _make_base(base: Path, root: Path, owners: Owners) -> None:
    """A layer below the image with what a sandbox needs and an image may lack."""
    base.mkdir(mode=0o755)
    etc = base / "etc"
    folders = {**dict.fromkeys(("proc", "dev", "sys", "run", "etc", "root", "var"), 0o755), "tmp": 0o1777}
    for name, mode in folders.items():
        (base / name).mkdir()
        (base / name).chmod(mode)
    files = {
        "hosts": f"127.0.0.1 localhost {HOST_NAME}\n::1 localhost\n",
        "hostname": f"{HOST_NAME}\n",
        "resolv.conf": "",
    }
    for name, text in files.items():
        (etc / name).write_text(text, encoding="utf-8")
        existing = root / "etc" / name
        # Builders leave an empty file where the engine mounts its own.
        if existing.is_file() and not existing.is_symlink() and existing.stat().st_size == 0:
            existing.unlink()
    if owners.change:
        for path in (base, *base.rglob("*")):
            os.chown(path, owners.of(0), owners.of(0), follow_symlinks=False)


def _tell(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Do what the order says; returns the exit code."""
    order = Order.from_json(sys.stdin.buffer.read())
    os.umask(0o022)
    if not order.digest:
        _report(order, lambda: {"digest": digest_of(Path(order.source))})
    elif order.ids.privileged or not order.ids.switchable:
        _report(order, lambda: {"image": unpack(order)})
    else:
        return run_mapped(order.ids, lambda: _report(order, lambda: {"image": unpack(order)}))
    return 0


def _report(order: Order, work: Callable[[], dict[str, Any]]) -> None:
    try:
        _tell(work())
    except LayerError as error:
        _tell({"error": str(error), "kind": "image"})
    except OSError as error:
        kind = "space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "image"
        _tell({"error": f"{error.filename or order.source}: {error.strerror}", "kind": kind})


if __name__ == "__main__":
    sys.exit(main())
