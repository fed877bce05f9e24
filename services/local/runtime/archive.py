"""Reads images: `docker save` archives, OCI layouts (archive or folder), plain root archives. Formats: the OCI image
specification 1.1 (image-layout, manifest, config) and the manifest.json of `docker save`.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, Protocol, cast

from services.local.runtime.layers import LayerError

_MAGIC: Final = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64"}
_LARGEST_DOCUMENT: Final = 8 << 20
_DEEPEST_INDEX: Final = 4


@dataclass(frozen=True, slots=True)
class Description:
    """What an image says of itself.

    Attributes:
        layers: names of its layers in the archive, the lowest first.
        env: ENV.
        working_directory: WORKDIR.
        user: USER.
    """

    layers: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    working_directory: str = ""
    user: str = ""


class Files(Protocol):
    """Named files of an archive or folder."""

    def has(self, name: str) -> bool:
        """Whether it is there."""

    def open(self, name: str) -> BinaryIO:
        """Open one.

        Raises:
            LayerError: it is not there.
        """


class FolderFiles:
    """Files of a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: str) -> bool:
        """See Files."""
        return (self._folder / name).is_file()

    def open(self, name: str) -> BinaryIO:
        """See Files."""
        path = self._folder / name
        if ".." in Path(name).parts or not path.is_file():
            raise LayerError(f"the image names {name!r}, which is not there")
        return path.open("rb")


class ArchiveFiles:
    """Files of an uncompressed tar archive."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._members = {member.name.removeprefix("./"): member for member in tar}

    def has(self, name: str) -> bool:
        """See Files."""
        return name in self._members

    def open(self, name: str) -> BinaryIO:
        """See Files."""
        member = self._members.get(name)
        # `docker save` of old stores a layer that several images share as a link.
        file = None if member is None else self._tar.extractfile(member)
        if file is None:
            raise LayerError(f"the image names {name!r}, which is not in the archive")
        return cast("BinaryIO", file)


def compression(start: bytes) -> str:
    """Name of the compression of a file that begins like this; empty: none that is known."""
    return next((name for magic, name in _MAGIC.items() if start.startswith(magic)), "")


@contextlib.contextmanager
def decompressed(file: BinaryIO) -> Iterator[BinaryIO]:
    """The plain bytes of a file that can be read from its start.

    Raises:
        LayerError: its compression is not known here.
    """
    start = file.read(8)
    file.seek(0)
    kind = compression(start)
    if kind == "gzip":
        with gzip.GzipFile(fileobj=file) as plain:
            yield cast("BinaryIO", plain)
    elif kind == "bzip2":
        with bz2.BZ2File(file) as plain_bzip2:
            yield cast("BinaryIO", plain_bzip2)
    elif kind == "xz":
        with lzma.LZMAFile(file) as plain_xz:
            yield cast("BinaryIO", plain_xz)
    elif kind == "zstd":
        with _zstd(file) as plain_zstd:
            yield plain_zstd
    else:
        yield file


@contextlib.contextmanager
def _zstd(file: BinaryIO) -> Iterator[BinaryIO]:
    program = shutil.which("zstd")
    if program is None:
        raise LayerError("it is compressed by zstd: install the program zstd, or decompress it first")
    with subprocess.Popen([program, "-dc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        import threading

        def feed() -> None:
            with contextlib.suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as target:
                shutil.copyfileobj(file, target, 1 << 20)

        feeder = threading.Thread(target=feed, name="zstd input")
        feeder.start()
        try:
            yield cast("BinaryIO", process.stdout)
        finally:
            process.kill()
            feeder.join()


def describe(files: Files) -> Description | None:
    """The description of an image in one of the two formats; None: these files are of neither.

    Raises:
        LayerError: it is of one, and broken.
    """
    if files.has("manifest.json"):
        manifests = _document(files, "manifest.json")
        if isinstance(manifests, list) and manifests and "Layers" in manifests[0]:
            if len(manifests) > 1:
                raise LayerError("the archive holds several images: save one alone")
            return _description(_document(files, manifests[0]["Config"]), manifests[0]["Layers"])
    if files.has("index.json") and files.has("oci-layout"):
        return _describe_layout(files, _document(files, "index.json"), 0)
    return None


def _describe_layout(files: Files, index: Any, depth: int) -> Description:
    manifests = [m for m in index.get("manifests", []) if _is_ours(m)]
    if not manifests:
        raise LayerError(f"the image is not made for this machine ({platform.machine()})")
    if len(manifests) > 1:
        raise LayerError("the layout holds several images: copy one alone")
    document = _document(files, _blob(manifests[0]["digest"]))
    if "manifests" in document:
        if depth == _DEEPEST_INDEX:
            raise LayerError("the layout's index refers to indexes without end")
        return _describe_layout(files, document, depth + 1)
    layers = [_blob(layer["digest"]) for layer in document["layers"]]
    return _description(_document(files, _blob(document["config"]["digest"])), layers)


def _is_ours(manifest: Mapping[str, Any]) -> bool:
    wanted = _ARCHITECTURES.get(platform.machine(), platform.machine())
    made_for = manifest.get("platform", {}).get("architecture", wanted)
    # Attestations are listed beside images, for a machine called "unknown".
    return bool(made_for == wanted)


def _blob(digest: str) -> str:
    algorithm, _, value = digest.partition(":")
    if not (algorithm.isalnum() and value.isalnum()):
        raise LayerError(f"{digest[:100]!r} is no digest")
    return f"blobs/{algorithm}/{value}"


def _document(files: Files, name: str) -> Any:
    with files.open(name) as file:
        data = file.read(_LARGEST_DOCUMENT + 1)
    if len(data) > _LARGEST_DOCUMENT:
        raise LayerError(f"{name} is too large to be a document")
    try:
        return json.loads(data)
    except ValueError:
        raise LayerError(f"{name} is not JSON") from None


def _description(document: Mapping[str, Any], layers: list[str]) -> Description:
    config = document.get("config") or {}
    pairs = (str(item).partition("=") for item in config.get("Env") or [])
    return Description(
        layers=tuple(layers),
        env={key: value for key, _, value in pairs if key},
        working_directory=str(config.get("WorkingDir") or ""),
        user=str(config.get("User") or ""),
    )
