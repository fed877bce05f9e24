"""What is mounted below a folder of the host that sandboxes see.

An ordinary user cannot stack layers over such a folder: its user namespace must not see below what others have mounted,
so the kernel refuses the overlay (EINVAL). A small one, such as the /etc of a container, is copied without what is
mounted in it; a large one is shown as it is, read-only, with what is mounted in it covered.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MOST_BYTES: Final = 64 << 20
_MOST_ENTRIES: Final = 20_000


def mount_points() -> list[str]:
    """Where something is mounted, as this process sees it."""
    found = []
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        # Blanks and such are written as three octal digits.
        raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), line.split(b" ")[4])
        found.append(os.fsdecode(raw))
    return found


def below(folder: str, points: Iterable[str]) -> tuple[str, ...]:
    """The mount points below a folder, relative to it; not those below another one."""
    found = sorted({point[len(folder) + 1 :] for point in points if point.startswith(f"{folder}/")})
    return tuple(one for one in found if not any(one.startswith(f"{other}/") for other in found))


@dataclass(frozen=True, slots=True)
class Copying:
    """A folder to copy, without some of what is in it."""

    folder: str
    entries: tuple[tuple[str, os.stat_result], ...]

    @property
    def digest(self) -> str:
        """Changes with anything in it."""
        told = [
            # What is in a folder has entries of its own, unless something is mounted on it.
            (name, info.st_mode, *(() if stat.S_ISDIR(info.st_mode) else (info.st_size, info.st_mtime_ns)))
            for name, info in self.entries
        ]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:12]

    def copy(self, target: Path) -> None:
        """Make the copy. What cannot be read, or is gone by now, is left out."""
        folders = []
        target.mkdir()
        for name, info in self.entries:
            source, made = os.path.join(self.folder, name), target / name  # noqa: PTH118
            try:
                if stat.S_ISDIR(info.st_mode):
                    made.mkdir(mode=0o700)
                    folders.append((made, info))
                elif stat.S_ISLNK(info.st_mode):
                    made.symlink_to(os.readlink(source))  # noqa: PTH115
                else:
                    shutil.copyfile(source, made, follow_symlinks=False)
                    made.chmod(stat.S_IMODE(info.st_mode))
            except OSError:
                continue
        for made, info in [*reversed(folders), (target, os.stat(self.folder))]:  # noqa: PTH116
            made.chmod(stat.S_IMODE(info.st_mode))


def small_enough(folder: str, hidden: Iterable[str], mounted: Iterable[str]) -> Copying | None:
    """What to copy of a folder; None if that is too much. A folder with a mount on it becomes an empty one."""
    left_out, empty = set(hidden), set(mounted)
    found: list[tuple[str, os.stat_result]] = []
    size = 0
    pending = [""]
    while pending:
        parent = pending.pop()
        try:
            entries = sorted(os.scandir(os.path.join(folder, parent)), key=lambda entry: entry.name)  # noqa: PTH118
        except OSError:
            continue
        for entry in entries:
            name = os.path.relpath(entry.path, folder)
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # gone, or a file system that is somebody else's alone
            is_folder = stat.S_ISDIR(info.st_mode)
            if name in left_out or (name in empty and not is_folder) or not _kept(info.st_mode):
                continue
            found.append((name, info))
            size += 0 if is_folder else info.st_size
            if len(found) > _MOST_ENTRIES or size > _MOST_BYTES:
                return None
            if is_folder and name not in empty:
                pending.append(name)
    return Copying(folder, tuple(found))


def _kept(mode: int) -> bool:
    return stat.S_ISDIR(mode) or stat.S_ISLNK(mode) or stat.S_ISREG(mode)
