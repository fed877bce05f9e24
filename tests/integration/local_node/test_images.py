"""Images of every format, on each level of user ids. The images are built here, of a static program and of the
launcher.
"""

import gzip
import hashlib
import io
import json
import platform
import shutil
import tarfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from orchard.node.v1 import node_service_pb2

from services.exec_agent.launcher import launcher_path
from tests.integration.local_node.harness import PATIENCE, NodeProcess

Entry = tuple[str, Any]


def layer(*entries: Entry) -> bytes:
    """A tar of (path, what): bytes are a file, "dir" a folder, ("link", x), ("hard", x); a dict sets TarInfo's fields
    too.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, given in entries:
            what, fields = given if isinstance(given, tuple) and isinstance(given[1], dict) else (given, {})
            info = tarfile.TarInfo(path)
            info.mode = 0o755
            data = b""
            if isinstance(what, bytes):
                data = what
                info.size = len(data)
            elif what == "dir":
                info.type = tarfile.DIRTYPE
            elif what[0] == "link":
                info.type, info.linkname = tarfile.SYMTYPE, what[1]
            elif what[0] == "hard":
                info.type, info.linkname = tarfile.LNKTYPE, what[1]
            for key, value in fields.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def busybox() -> bytes:
    path = shutil.which("busybox")
    assert path is not None, "install the package busybox-static: images are tested with it"
    return Path(path).read_bytes()


def root_layer() -> bytes:
    tools = [
        (f"bin/{name}", ("link", "busybox")) for name in ("sh", "cat", "ls", "stat", "id", "echo", "test", "touch")
    ]
    return layer(
        ("bin", "dir"),
        ("bin/busybox", busybox()),
        *tools,
        ("etc", "dir"),
        ("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/app:/bin/sh\n"),
        ("etc/hosts", b""),
        ("app", ("dir", {"uid": 1000, "gid": 1000})),
        ("app/lower", b"lower\n"),
        ("app/gone", b"gone\n"),
        ("data", "dir"),
        ("data/old", b"old\n"),
    )


def top_layer() -> bytes:
    return layer(
        ("app/.wh.gone", b""),
        ("app/lower", b"upper\n"),
        ("data/.wh..wh..opq", b""),
        ("data/new", b"new\n"),
        ("app/twin", ("hard", "app/lower")),
    )


CONFIG = {"Env": ["COLOUR=blue", "PATH=/bin", "PYTHONPATH=/x"], "WorkingDir": "/app", "User": ""}


def docker_save(folder: Path, layers: list[bytes], *, compress: bool = False) -> Path:
    config = json.dumps({"architecture": "amd64", "config": CONFIG}).encode()
    names = [f"{index}/layer.tar" for index in range(len(layers))]
    manifest = json.dumps([{"Config": "config.json", "RepoTags": ["x:1"], "Layers": names}]).encode()
    files = [("config.json", config), ("manifest.json", manifest), *zip(names, layers, strict=True)]
    data = layer(*files)
    path = folder / ("image.tar.gz" if compress else "image.tar")
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def oci_layout(folder: Path, layers: list[bytes], *, nested: bool = True) -> Path:
    root = folder / "oci"
    blobs = root / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    config = put(json.dumps({"config": CONFIG}).encode())
    packed = [put(gzip.compress(data)) for data in layers]
    manifest = {**put(json.dumps({"config": config, "layers": packed}).encode()), "platform": {"architecture": machine}}
    other = {"digest": "sha256:00", "size": 1, "platform": {"architecture": "s390x"}}
    index: dict[str, Any] = {"manifests": [other, manifest]}
    if nested:
        index = {"manifests": [put(json.dumps(index).encode())]}
    (root / "index.json").write_text(json.dumps(index))
    (root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return root


def plain_root(folder: Path, layers: list[bytes]) -> Path:
    path = folder / "root.tar.gz"
    path.write_bytes(gzip.compress(layers[0]))
    return path


def a_folder(folder: Path, layers: list[bytes]) -> Path:
    root = folder / "root"
    root.mkdir()
    with tarfile.open(fileobj=io.BytesIO(layers[0])) as tar:
        tar.extraction_filter = staticmethod(lambda member, _path: member)
        tar.extractall(root)
    return root


@pytest.fixture
def place(leveled: NodeProcess) -> Path:
    path = leveled.home / "sources"
    path.mkdir(mode=0o755)
    return path


async def import_image(node: NodeProcess, path: Path, name: str = "box:1", *, replace: bool = False) -> Any:
    for item in (path, *path.rglob("*")):  # any user may read it
        if not item.is_symlink():
            item.chmod(item.stat().st_mode | 0o444)
    request = node_service_pb2.ImportImageRequest(name=name, source_path=str(path), replace=replace)
    last = None
    async for response in node.stub.ImportImage(request, timeout=PATIENCE):
        assert response.done_bytes <= max(response.total_bytes, response.done_bytes)
        last = response
    assert last is not None and last.HasField("image")
    return last.image


@pytest.mark.parametrize("make", [docker_save, oci_layout, plain_root, a_folder])
async def test_an_image_of_each_format_runs(leveled: NodeProcess, place: Path, make: Any) -> None:
    layered = make in (docker_save, oci_layout)
    image = await import_image(leveled, make(place, [root_layer(), top_layer()]))
    assert image.name == "box:1"
    assert len(image.digest) == 64
    if layered:
        assert (dict(image.env), image.working_directory) == (
            {"COLOUR": "blue", "PATH": "/bin", "PYTHONPATH": "/x"},
            "/app",
        )
    assert image.size >= len(busybox())
    box = await leveled.box(image="box:1", env={} if layered else {"PATH": "/bin"})
    names = set((await box.ok("ls /")).split())
    assert {"app", "bin", "data", "dev", "etc", "proc", "tmp"} <= names
    assert "usr" not in names
    if layered:
        assert (await box.ok("echo $COLOUR $PYTHONPATH; cat lower twin; ls /data")).split() == [
            *("blue", "/x", "upper", "upper", "new")
        ]
        assert (await box.run("test -e /app/gone")).code == 1
    else:
        assert (await box.ok("cat /app/lower /data/old")).split() == ["lower", "old"]
    assert "localhost" in await box.ok("cat /etc/hosts")
    await box.ok("touch /bin/new /app/new /etc/new")
    level = (await leveled.describe()).user_ids
    owner = (await box.ok("stat -c %u:%g /app")).strip()
    # Of a folder's owners an ordinary user can only keep those that it is itself.
    kept = "65534:65534" if make is a_folder else "1000:1000"
    assert owner == {"shifted": "1000:1000", "subids": kept, "single": "0:0"}[level]
    if level != "single":
        assert (await box.ok("id -u", user="app", cwd="/")).strip() == "1000"
    other = await leveled.box(image="box:1", env={"PATH": "/bin"})
    assert (await other.run("test -e /app/new")).code == 1
    await leveled.delete(box.uid)
    await leveled.delete(other.uid)
    await leveled.stub.RemoveImage(node_service_pb2.RemoveImageRequest(name="box:1"), timeout=PATIENCE)
    assert [path.name for path in (leveled.data / "node" / "images").iterdir()] == ["names"]


async def test_files_of_every_user_are_removed_with_the_sandbox(leveled: NodeProcess) -> None:
    box = await leveled.box()
    await box.ok("mkdir -p /root/d/e && touch /root/d/e/f && chown -R 1234:1234 /root/d && chmod 000 /root/d/e")
    await leveled.delete(box.uid)
    assert not box.folder.exists()


HOSTILE = [
    [("../escape", b"x")],
    [("a/../../escape", b"x")],
    [("bin", ("link", "/tmp")), ("bin/../../escape", b"x")],
]


@pytest.mark.parametrize("entries", HOSTILE)
async def test_names_that_leave_the_root_are_refused(leveled: NodeProcess, place: Path, entries: list[Entry]) -> None:
    path = place / "root.tar"
    path.write_bytes(layer(*entries))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await import_image(leveled, path)
    assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "leaves the root" in error.value.details()
    assert [p.name for p in (leveled.data / "node" / "images").iterdir()] == ["names"]


async def test_links_in_an_image_lead_into_the_image(leveled: NodeProcess, place: Path) -> None:
    """A layer that writes through its own links to the host's folders writes into the image."""
    mark = f"/tmp/{place.parent.name}-mark"
    path = docker_save(
        place,
        [
            root_layer(),
            layer(("out", ("link", "/tmp")), ("up", ("link", "../../../../tmp"))),
            layer((f"out/{Path(mark).name}", b"x"), (f"up/{Path(mark).name}-2", b"x"), ("/abs/file", b"y")),
        ],
    )
    await import_image(leveled, path)
    assert not Path(mark).exists() and not Path(f"{mark}-2").exists()
    box = await leveled.box(image="box:1")
    assert (await box.ok(f"cat {mark} {mark}-2 /abs/file")) == "xxy"


async def test_names_and_states_of_images(node: NodeProcess) -> None:
    place = node.home / "sources"
    place.mkdir(mode=0o755)
    path = docker_save(place, [root_layer(), top_layer()])
    first = await import_image(node, path, "b")
    assert (await import_image(node, path, "a")).digest == first.digest
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await import_image(node, path, "a")
    assert error.value.code() == grpc.StatusCode.ALREADY_EXISTS
    page = await node.stub.ListImages(node_service_pb2.ListImagesRequest(page_size=1), timeout=PATIENCE)
    assert [image.name for image in page.images] == ["a"]
    rest = await node.stub.ListImages(node_service_pb2.ListImagesRequest(page_token=page.next_page_token))
    assert ([image.name for image in rest.images], rest.next_page_token) == (["b"], "")

    box = await node.box(image="a")
    await node.stub.RemoveImage(node_service_pb2.RemoveImageRequest(name="b"), timeout=PATIENCE)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await node.stub.RemoveImage(node_service_pb2.RemoveImageRequest(name="a"), timeout=PATIENCE)
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    # Replaced while in use, also over a restart of the daemon: the sandbox keeps its root until it goes.
    (place / "image.tar").unlink()
    second = await import_image(node, docker_save(place, [root_layer()]), "a", replace=True)
    assert second.digest != first.digest
    assert (await box.ok("cat /app/lower")).strip() == "upper"
    await node.stop()
    await node.start()
    assert (await box.ok("cat /app/lower")).strip() == "upper"
    assert (node.data / "node" / "images" / first.digest).exists()
    await node.delete(box.uid)
    assert not (node.data / "node" / "images" / first.digest).exists()
    newer = await node.box(image="a", env={"PATH": "/bin"})
    assert (await newer.ok("cat /app/lower")).strip() == "lower"


@pytest.mark.parametrize(
    ("name", "source", "code"),
    [
        ("Bad Name", "/etc/hostname", grpc.StatusCode.INVALID_ARGUMENT),
        ("ok", "relative", grpc.StatusCode.INVALID_ARGUMENT),
        ("ok", "/never/there", grpc.StatusCode.NOT_FOUND),
        ("ok", "/etc/hostname", grpc.StatusCode.INVALID_ARGUMENT),
        ("ok", "/proc/self/fd", grpc.StatusCode.INVALID_ARGUMENT),
        ("ok", "/dev/null", grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_what_is_no_image_is_refused(node: NodeProcess, name: str, source: str, code: grpc.StatusCode) -> None:
    request = node_service_pb2.ImportImageRequest(name=name, source_path=source)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in node.stub.ImportImage(request, timeout=PATIENCE):
            pass
    assert error.value.code() == code
    assert [path.name for path in (node.data / "node" / "images").iterdir()] == ["names"]


async def test_an_image_of_one_program(node: NodeProcess) -> None:
    """No shell, no library, no folder but its own."""
    path = node.home / "scratch.tar"
    path.write_bytes(layer(("launcher", launcher_path().read_bytes())))
    await import_image(node, path, "scratch")
    box = await node.box(image="scratch")
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await box.run("true")
    assert "neither bash nor sh" in error.value.details()
