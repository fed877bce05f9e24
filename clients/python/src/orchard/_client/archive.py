"""Folders as tar streams: packed in blocks of bounded size, unpacked without letting anything out of the target."""

from __future__ import annotations

import fnmatch
import os
import stat
import tarfile
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final, Literal

from orchard._client.errors import UnsafeArchive

BLOCK: Final = 1 << 20
_RECORD: Final = 512

UnsafeLinks = Literal["error", "skip"]


def tree_size(root: Path, exclude: Sequence[str] = ()) -> int:
    """Bytes of the regular files that pack() would send."""
    return sum(info.st_size for _path, _name, info in _walk(root, exclude) if stat.S_ISREG(info.st_mode))


def pack(root: Path, exclude: Sequence[str] = ()) -> Generator[tuple[bytes, int], None, None]:
    """Yield the contents of a folder as a pax archive: (block, bytes of file contents that were read for it). A block
    has BLOCK bytes, the last one perhaps fewer: small files share blocks.

    Symbolic links are kept as links; sockets, pipes and devices are left out.

    Raises:
        OSError: a file cannot be read, or shrank while it was read.
    """
    buffer = bytearray()
    content = 0
    for piece, size in _pieces(root, exclude):
        buffer += piece
        content += size
        while len(buffer) >= BLOCK:
            yield _taken(buffer), content
            content = 0
    buffer += bytes(2 * _RECORD)
    while buffer:
        yield _taken(buffer), content
        content = 0


def _taken(buffer: bytearray) -> bytes:
    """The first block of a buffer, which then begins behind it."""
    with memoryview(buffer) as view:
        block = bytes(view[:BLOCK])
    del buffer[:BLOCK]
    return block


def _pieces(root: Path, exclude: Sequence[str]) -> Iterator[tuple[bytes, int]]:
    for path, name, info in _walk(root, exclude):
        entry = tarfile.TarInfo(name)
        entry.mode = stat.S_IMODE(info.st_mode)
        entry.mtime = int(info.st_mtime)
        if stat.S_ISDIR(info.st_mode):
            entry.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(info.st_mode):
            entry.type = tarfile.SYMTYPE
            entry.linkname = os.readlink(path)  # noqa: PTH115 (the text as it is)
        elif stat.S_ISREG(info.st_mode):
            yield from _file(path, entry)
            continue
        else:
            continue
        yield _header(entry), 0


def _header(entry: tarfile.TarInfo) -> bytes:
    return entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _file(path: str, entry: tarfile.TarInfo) -> Iterator[tuple[bytes, int]]:
    with open(path, "rb") as file:  # noqa: PTH123 (names may be no valid text)
        entry.size = os.fstat(file.fileno()).st_size
        yield _header(entry), 0
        left = entry.size
        while left:
            data = file.read(min(BLOCK, left))
            if not data:
                raise OSError(f"{path} became shorter while it was read")
            left -= len(data)
            yield data, len(data)
    yield bytes(-entry.size % _RECORD), 0


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[tuple[str, str, os.stat_result]]:
    """(path, name in the archive, lstat) of everything below a folder, folders before their contents, in the order of
    names.
    """
    pending = [(str(root), "")]
    while pending:
        folder, prefix = pending.pop()
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        below = []
        for entry in ordered:
            name = f"{prefix}{entry.name}"
            if any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(entry.name, p) for p in exclude):
                continue
            info = entry.stat(follow_symlinks=False)
            yield entry.path, name, info
            if stat.S_ISDIR(info.st_mode):
                below.append((entry.path, f"{name}/"))
        pending.extend(reversed(below))


def unpack(archive: IO[bytes], target: Path, unsafe_links: UnsafeLinks) -> int:
    """Unpack an archive below a folder, which is made if missing; contents merge. Returns the number of entries.

    The archive comes from a sandbox and may be hostile. Everything is checked before anything is written: no entry
    may name a place outside the target, and no link may point outside (with "skip" such links are left out). Links
    are made last, so no entry is written through one, and links that stand in the target already are replaced, not
    followed.

    Raises:
        UnsafeArchive: an entry would leave the target.
        OSError: something cannot be written.
    """
    with tarfile.open(fileobj=archive, mode="r:") as tar:
        checked = (_check(member, target, unsafe_links) for member in tar)
        members = [member for member in checked if member is not None]
        _check_places(members, target)
        target.mkdir(parents=True, exist_ok=True)
        directories = [m for m in members if m.isdir()]
        for member in members:
            if member.isdir():
                _make_directory(target, _parts(member.name))
            elif member.isreg():
                _write_file(tar, member, _place(target, member.name))
        for member in members:
            if member.islnk():
                _link(target, member)
            elif member.issym():
                place = _place(target, member.name)
                _clear(place)
                place.symlink_to(member.linkname)
        for member in reversed(directories):
            _make_directory(target, _parts(member.name)).chmod((member.mode or 0o755) | 0o700)
    return len(members)


def _parts(name: str) -> list[str]:
    return [part for part in name.split("/") if part not in ("", ".")]


def _check(member: tarfile.TarInfo, target: Path, unsafe_links: UnsafeLinks) -> tarfile.TarInfo | None:
    """The entry as it may be unpacked; None for one to leave out."""
    if member.isdev() or member.isfifo():
        return None
    if member.name.startswith("/") or ".." in member.name.split("/"):
        raise UnsafeArchive(f"entry {member.name!r} would leave {target}", metadata={"entry": member.name})
    if member.issym() and _leaves(member):
        if unsafe_links == "skip":
            return None
        raise UnsafeArchive(
            f"link {member.name!r} points to {member.linkname!r}, outside of the folder; leave such links out with "
            f'unsafe_links="skip"',
            metadata={"entry": member.name, "link_target": member.linkname},
        )
    if member.islnk() and (member.linkname.startswith("/") or ".." in member.linkname.split("/")):
        raise UnsafeArchive(f"hard link {member.name!r} points outside of the folder", metadata={"entry": member.name})
    # No bits that give rights on this machine: no setuid, nothing for others to write.
    member.mode = member.mode & 0o755 or 0o644
    return member


def _check_places(members: Sequence[tarfile.TarInfo], target: Path) -> None:
    """Refuse an archive in which something stands below a link, or a folder where a link is."""
    links = {tuple(_parts(member.name)) for member in members if member.issym()}
    for member in members:
        parts = _parts(member.name)
        depth = len(parts) + 1 if member.isdir() else len(parts)
        if any(tuple(parts[:length]) in links for length in range(1, depth)):
            raise UnsafeArchive(
                f"entry {member.name!r} would go through a link, out of {target}", metadata={"entry": member.name}
            )


def _leaves(member: tarfile.TarInfo) -> bool:
    """Whether a link's target is outside, by its text alone: an absolute one, or one with too many '..'."""
    if member.linkname.startswith("/"):
        return True
    depth = len(_parts(member.name)) - 1
    for part in _parts(member.linkname):
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False


def _make_directory(target: Path, parts: Iterable[str]) -> Path:
    """Make a folder below the target without following links."""
    path = target
    for part in parts:
        path /= part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        path.mkdir(exist_ok=True)
    return path


def _place(target: Path, name: str) -> Path:
    parts = _parts(name)
    return _make_directory(target, parts[:-1]) / parts[-1]


def _clear(place: Path) -> None:
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        place.unlink()


def _write_file(tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    source = tar.extractfile(member)
    if source is None:
        return
    _clear(place)
    # O_EXCL: never through anything that stands there.
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with source, open(descriptor, "wb") as file:  # noqa: PTH123
        while data := source.read(BLOCK):
            file.write(data)
        os.fchmod(file.fileno(), member.mode)
        os.utime(file.fileno(), (member.mtime, member.mtime))


def _link(target: Path, member: tarfile.TarInfo) -> None:
    place = _place(target, member.name)
    source = _make_directory(target, _parts(member.linkname)[:-1]) / _parts(member.linkname)[-1]
    if source.is_symlink() or not source.is_file():
        raise UnsafeArchive(f"hard link {member.name!r} has no file to link to", metadata={"entry": member.name})
    _clear(place)
    os.link(source, place)
