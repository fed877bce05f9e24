"""What a patch makes of one file's content and of its mode, and what it can make nothing of."""

from __future__ import annotations

import hashlib
import stat
from typing import Final

from services.exec_agent.files.patch.binary import DeltaError, apply_delta
from services.exec_agent.files.patch.hunks import HunkResult, apply_hunks
from services.exec_agent.files.patch.model import BinaryChange, Entry, FilePatch, UnpatchableError

_EXECUTABLE: Final = 0o111
_GIT_LINK: Final = 0o160000
_FULL_ID_LENGTHS: Final = (40, 64)  # SHA-1 and SHA-256
_EMPTY_FILE: Final = b"blob 0\0"
_EMPTY_FILE_IDS: Final = (
    hashlib.sha1(_EMPTY_FILE, usedforsecurity=False).hexdigest(),
    hashlib.sha256(_EMPTY_FILE).hexdigest(),
)


def full_id(text: str) -> str:
    """Git's whole id of a file; empty if it is abbreviated, unless it is that of the empty file."""
    if not text or len(text) in _FULL_ID_LENGTHS:
        return text
    return next((whole for whole in _EMPTY_FILE_IDS if whole.startswith(text)), "")


def refuse_hopeless(patch: FilePatch) -> None:
    """Refuse what fits no file at all."""
    if patch.problem:
        raise UnpatchableError(patch.problem)
    if _GIT_LINK in (patch.old_mode, patch.new_mode):
        raise UnpatchableError("it is a submodule; only files and links can be patched")


def text_content(patch: FilePatch, data: bytes, source: Entry | None, fuzz: int) -> tuple[bytes, list[HunkResult]]:
    """The new content of a text file, and what became of each hunk."""
    hunks = patch.hunks
    if data and hunks and patch.old_id in _EMPTY_FILE_IDS and not any(hunk.old for hunk in hunks):
        # Its lines may be there already, and nothing shows where in the others they belong.
        raise UnpatchableError("it is not empty; the patch adds lines to an empty file")
    if patch.has_carriage_returns and b"\r\n" not in data and source is not None:
        hunks = tuple(hunk.without_carriage_returns() for hunk in hunks)
    return apply_hunks(data, hunks, fuzz)


def binary_content(patch: FilePatch, change: BinaryChange, data: bytes, source: Entry | None) -> bytes:
    """The new content of a binary file. Git's own check applies: the old content must be the very one."""
    if not patch.old_id or not patch.new_id:
        raise UnpatchableError("the binary patch has no full object ids; make it with `git diff --binary`")
    is_absent = not patch.old_id.strip("0")
    if source is not None and not is_absent and _object_id(data, patch.old_id) != patch.old_id:
        raise UnpatchableError("its content is not the one that the binary patch was made from")
    try:
        new = apply_delta(change.payload, data) if change.is_delta else change.payload
    except DeltaError as error:
        raise UnpatchableError(str(error)) from None
    if patch.new_id.strip("0") and _object_id(new, patch.new_id) != patch.new_id:
        raise UnpatchableError("the binary patch does not give the content that its object id names")
    return new


def _object_id(data: bytes, like: str) -> str:
    """Git's id of a file: the hash of a short header and the content."""
    digest = hashlib.sha1(usedforsecurity=False) if len(like) == 40 else hashlib.sha256()
    digest.update(b"blob %d\0" % len(data))
    digest.update(data)
    return digest.hexdigest()


def new_mode(patch: FilePatch, source: Entry | None) -> int:
    """The mode of the result: git keeps of permissions only whether a file can be executed."""
    wanted = patch.new_mode
    if source is None:
        wanted = wanted or stat.S_IFREG | 0o644
        if stat.S_ISLNK(wanted):
            return stat.S_IFLNK | 0o777
        return stat.S_IFREG | (0o755 if wanted & _EXECUTABLE else 0o644)
    if not wanted or wanted == patch.old_mode:
        return source.mode
    if stat.S_IFMT(wanted) != stat.S_IFMT(source.mode):
        raise UnpatchableError("the patch turns a file into a link or back in one step; it should delete and create it")
    if wanted & _EXECUTABLE:
        return source.mode | (source.mode & 0o444) >> 2
    return source.mode & ~_EXECUTABLE
