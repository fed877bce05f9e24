"""Bodies (images, large texts) in files named by their hash, read when they are asked for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from orchard.data.errors import DataError, Where

_EXTENSIONS: Final[Mapping[str, str]] = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/gif": ".gif",
    "image/webp": ".webp",
    "audio/wav": ".wav",
    "audio/mpeg": ".mp3",
    "text/plain": ".txt",
}
MEDIA_TYPES: Final[Mapping[str, str]] = {suffix: media for media, suffix in _EXTENSIONS.items()} | {
    ".jpeg": "image/jpeg"
}
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_SIGNATURES: Final = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"RIFF", "image/webp"),
)


def extension(media_type: str) -> str:
    """The end of a file's name."""
    return _EXTENSIONS.get(media_type, ".bin")


def media_type_of(data: bytes) -> str:
    """The media type of an image by its first bytes."""
    return next((media for signature, media in _SIGNATURES if data.startswith(signature)), "application/octet-stream")


class FolderBodies(Mapping[str, bytes]):
    """The bodies in a folder, as a mapping by SHA-256."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, sha256: str) -> bytes:
        path = next(iter(self._folder.glob(f"{sha256}.*")), None) if _HASH.fullmatch(sha256) else None
        if path is None:
            raise KeyError(sha256)
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DataError("is not what its name says: the hash differs", where=Where(str(path)), fix="export again")
        return data

    def __iter__(self) -> Iterator[str]:
        return (path.stem for path in self._folder.glob("*.*"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
