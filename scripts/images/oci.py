"""OCI image archives of folders, with nothing but Python: same folders, same bytes (image-spec 1.0, image layout)."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@dataclass(frozen=True)
class Layer:
    """One folder as a tar, compressed or not, in a file."""

    path: Path
    digest: str
    """Of the file."""
    diff_id: str
    """Of what it is uncompressed."""
    compressed: bool

    @property
    def descriptor(self) -> dict[str, Any]:
        media_type = f"{LAYER}+gzip" if self.compressed else LAYER
        return {"mediaType": media_type, "digest": self.digest, "size": self.path.stat().st_size}


@dataclass(frozen=True)
class Image:
    """A name, such as orchard.test/busybox:1, with its layers and what a container of it starts with."""

    name: str
    layers: Sequence[Layer]
    arch: str
    entrypoint: Sequence[str] = ()
    env: Sequence[str] = ()
    workdir: str = ""
    user: str = ""
    labels: dict[str, str] = field(default_factory=dict)


class _Hashing(io.RawIOBase):
    """Writes through and knows the digest of what passed."""

    def __init__(self, target: BinaryIO) -> None:
        self._target = target
        self._digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._digest.update(data)
        return self._target.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._digest.hexdigest()}"


def write_layer(folder: Path, target: Path, *, compress: bool) -> Layer:
    """The folder's content as root's, without times."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with target.open("wb") as raw:
        outer = _Hashing(raw)
        with contextlib.ExitStack() as stack:
            sink: Any = outer
            if compress:
                sink = stack.enter_context(gzip.GzipFile("", "wb", 6, outer, mtime=0))
            inner = _Hashing(sink)
            with tarfile.open(fileobj=inner, mode="w|", format=tarfile.PAX_FORMAT) as tar:
                tar.add(folder, arcname=".", filter=plain)
    return Layer(target, outer.digest, inner.digest, compress)


def write_archive(out: Path, images: Sequence[Image]) -> None:
    """All images in one archive; a layer that several have is in it once."""
    written: set[str] = set()
    with tarfile.open(out, "w") as tar:

        def put(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        def blob(media_type: str, value: object) -> dict[str, Any]:
            data = encoded(value)
            digest = hashlib.sha256(data).hexdigest()
            if digest not in written:
                written.add(digest)
                put(f"blobs/sha256/{digest}", data)
            return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

        listed = []
        for image in images:
            for layer in image.layers:
                if layer.digest not in written:
                    written.add(layer.digest)
                    _add_file(tar, f"blobs/{layer.digest.replace(':', '/')}", layer.path)
            manifest = blob(MANIFEST, _manifest(image, blob(CONFIG, _config(image))))
            manifest["annotations"] = {
                "io.containerd.image.name": image.name,
                "org.opencontainers.image.ref.name": image.name.rpartition(":")[2],
            }
            listed.append(manifest)
        put("index.json", encoded({"schemaVersion": 2, "manifests": listed}))
        put("oci-layout", encoded({"imageLayoutVersion": "1.0.0"}))


def _add_file(tar: tarfile.TarFile, name: str, path: Path) -> None:
    member = tarfile.TarInfo(name)
    member.size = path.stat().st_size
    with path.open("rb") as file:
        tar.addfile(member, file)


def _config(image: Image) -> dict[str, Any]:
    config = {
        "Entrypoint": list(image.entrypoint),
        "Env": [PATH, *image.env],
        "WorkingDir": image.workdir,
        "User": image.user,
        "Labels": image.labels,
    }
    return {
        "architecture": ARCHITECTURES[image.arch],
        "os": "linux",
        "config": {key: value for key, value in config.items() if value},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in image.layers]},
    }


def _manifest(image: Image, config: dict[str, Any]) -> dict[str, Any]:
    layers = [layer.descriptor for layer in image.layers]
    return {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers}


def encoded(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
