"""Unpacks root file systems: tar layers with whiteouts, or a folder; never outside of the target, whatever the names
and links say.

Every path is opened below the target as if that were "/" (openat2, RESOLVE_IN_ROOT), so a layer's link to /etc leads
to the image's own /etc.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from services.local.runtime import linux
from services.local.runtime.removal import remove_tree

WHITEOUT: Final = ".wh."
OPAQUE: Final = ".wh..wh..opq"
_BUFFER: Final = 1 << 20
_NOBODY: Final = 65534
_MOST_LINKS: Final = 40  # as the kernel
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY


class LayerError(Exception):
    """Not a layer that can be unpacked; the message says why."""


@dataclass(frozen=True, slots=True)
class Owners:
    """What becomes of owners.

    Attributes:
        change: owners can be set at all.
        shift: add this to every id.
        count: ids from here on become nobody's.
    """

    change: bool
    shift: int = 0
    count: int = 65_536

    def of(self, number: int) -> int:
        """The machine's id for an id of the image."""
        return self.shift + (number if 0 <= number < self.count else _NOBODY)


class Unpacker:
    """Fills one root folder, layer upon layer."""

    def __init__(self, root: int, owners: Owners) -> None:
        self._root = root
        self._owners = owners
        self.size = 0

    def unpack(self, archive: BinaryIO) -> None:
        """Put a tar layer on top of what is there.

        Raises:
            LayerError: it is no tar archive, or has an entry that leaves the root.
        """
        mine: set[str] = set()
        try:
            with tarfile.open(fileobj=archive, mode="r|*") as tar:
                for entry in tar:
                    path = _clean(entry.name)
                    if path:
                        self._put(tar, entry, path, mine)
        except (tarfile.TarError, EOFError, UnicodeError) as error:
            raise LayerError(f"the archive is damaged or of a kind that is not known here: {error}") from None

    def _put(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, path: str, mine: set[str]) -> None:
        parent, name = os.path.split(path)
        with self._folder(parent) as folder:
            if name == OPAQUE:
                self._empty(folder, parent, mine)
                return
            if name.startswith(WHITEOUT):
                _remove(folder, name.removeprefix(WHITEOUT))
                return
            mine.add(path)
            if entry.isdir():
                self._put_folder(folder, name, entry)
                return
            _remove(folder, name)
            if entry.isreg():
                source = tar.extractfile(entry)
                assert source is not None  # noqa: S101 (a regular file has content)
                self._put_file(folder, name, cast("BinaryIO", source), entry.mode)
            elif entry.issym():
                os.symlink(entry.linkname, name, dir_fd=folder)
            elif entry.islnk():
                self._put_link(folder, name, entry.linkname)
                return
            elif entry.isfifo():
                os.mkfifo(name, 0o600, dir_fd=folder)
            else:
                return  # devices: a sandbox has its own /dev
            self._own(folder, name, entry.uid, entry.gid)
            if not entry.issym():
                os.chmod(name, stat.S_IMODE(entry.mode), dir_fd=folder)
            with contextlib.suppress(OSError, OverflowError):
                os.utime(name, (entry.mtime, entry.mtime), dir_fd=folder, follow_symlinks=False)

    @contextlib.contextmanager
    def _folder(self, path: str) -> Iterator[int]:
        """The folder of a path, made where it is not there."""
        descriptor = self._open_folder(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _open_folder(self, path: str, links: int = 0) -> int:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return linux.open_in_root(self._root, path or ".", _FOLDER_FLAGS)
        descriptor = os.dup(self._root)
        sofar = ""
        for part in path.split("/"):
            sofar = f"{sofar}/{part}"
            try:
                inner = linux.open_in_root(self._root, sofar, _FOLDER_FLAGS)
            except FileNotFoundError:
                inner = self._make_missing(descriptor, sofar, links)
            except NotADirectoryError:
                _remove(descriptor, part)
                inner = self._make_folder(descriptor, part)
            os.close(descriptor)
            descriptor = inner
        return descriptor

    def _make_missing(self, parent: int, path: str, links: int) -> int:
        """Make the folder of a path whose parent is there, or the one that a link there leads to."""
        folder, name = os.path.split(path)
        try:
            target = os.readlink(name, dir_fd=parent)
        except OSError:
            return self._make_folder(parent, name)
        if links == _MOST_LINKS:
            raise LayerError(f"the links at {path!r} lead nowhere")
        whole = target if target.startswith("/") else f"{folder}/{target}"
        return self._open_folder(whole.lstrip("/"), links + 1)

    def _make_folder(self, parent: int, name: str) -> int:
        os.mkdir(name, 0o755, dir_fd=parent)
        self._own(parent, name, 0, 0)
        return os.open(name, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=parent)

    def _put_folder(self, folder: int, name: str, entry: tarfile.TarInfo) -> None:
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            mode = 0
        if mode and not stat.S_ISDIR(mode):
            _remove(folder, name)
            mode = 0
        if not mode:
            os.mkdir(name, 0o700, dir_fd=folder)
        self._own(folder, name, entry.uid, entry.gid)
        # Without privilege a folder must stay ours to fill.
        os.chmod(name, stat.S_IMODE(entry.mode) | (0 if self._owners.change else 0o700), dir_fd=folder)

    def _put_file(self, folder: int, name: str, source: BinaryIO, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(name, flags, stat.S_IMODE(mode) & 0o777 | 0o200, dir_fd=folder)
        with os.fdopen(descriptor, "wb") as target:
            shutil.copyfileobj(source, target, _BUFFER)
            self.size += target.tell()

    def _put_link(self, folder: int, name: str, target: str) -> None:
        parent, last = os.path.split(_clean(target))
        try:
            source = linux.open_in_root(self._root, parent or ".", _FOLDER_FLAGS)
        except OSError:
            raise LayerError(f"entry {name!r} is a hard link to {target!r}, which is not in the archive") from None
        try:
            os.link(last, name, src_dir_fd=source, dst_dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            raise LayerError(f"entry {name!r} is a hard link to {target!r}, which is not in the archive") from None
        finally:
            os.close(source)

    def _empty(self, folder: int, path: str, mine: set[str]) -> None:
        """An opaque folder hides what lower layers have in it, not what this layer has put there already."""
        for name in os.listdir(folder):
            inner = f"{path}/{name}" if path else name
            if not any(own == inner or own.startswith(f"{inner}/") for own in mine):
                _remove(folder, name)

    def _own(self, folder: int, name: str, user: int, group: int) -> None:
        if self._owners.change:
            os.chown(name, self._owners.of(user), self._owners.of(group), dir_fd=folder, follow_symlinks=False)

    def copy(self, source: str, told: Callable[[int], None]) -> None:
        """Put a copy of a folder of this machine into the root. `told` hears of the bytes.

        Raises:
            OSError: something in it cannot be read.
        """
        pending = [""]
        while pending:
            path = pending.pop()
            with self._folder(path) as folder:
                for entry in os.scandir(os.path.join(source, path)):  # noqa: PTH118
                    inner = f"{path}/{entry.name}" if path else entry.name
                    if self._copy_one(entry, folder):
                        pending.append(inner)
                    told(self.size)

    def _copy_one(self, entry: os.DirEntry[str], folder: int) -> bool:
        """Copy one entry; says whether it is a folder to go into."""
        info = entry.stat(follow_symlinks=False)
        name, mode = entry.name, info.st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(name, 0o700, dir_fd=folder)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(entry.path), name, dir_fd=folder)  # noqa: PTH115
        elif stat.S_ISREG(mode):
            with open(entry.path, "rb") as file:  # noqa: PTH123
                self._put_file(folder, name, file, mode)
        elif stat.S_ISFIFO(mode):
            os.mkfifo(name, 0o600, dir_fd=folder)
        else:
            return False
        self._own(folder, name, info.st_uid, info.st_gid)
        if not stat.S_ISLNK(mode):
            keep = 0o700 if stat.S_ISDIR(mode) and not self._owners.change else 0
            os.chmod(name, stat.S_IMODE(mode) | keep, dir_fd=folder)
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=folder, follow_symlinks=False)
        return stat.S_ISDIR(mode)


def _clean(name: str) -> str:
    """A relative path without "." parts.

    Raises:
        LayerError: it has a ".." part.
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise LayerError(f"entry {name!r} leaves the root: refused")
    return "/".join(parts)


def _remove(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return
    except (IsADirectoryError, PermissionError):
        remove_tree(Path(f"/proc/self/fd/{folder}/{name}"))
