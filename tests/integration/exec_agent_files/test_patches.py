"""Patches and archives over real gRPC."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import grpc
import pytest
from orchard.exec.v1 import file_pb2
from orchard.exec.v1.file_service_pb2_grpc import FileServiceStub

from services.exec_agent.files import patching, placing
from tests.integration.exec_agent_files.calls import download, fails, patch, upload

_PATCH = b"""\
diff --git a/src/a.py b/src/a.py
--- a/src/a.py
+++ b/src/a.py
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
diff --git a/new/b.py b/new/b.py
new file mode 100755
--- /dev/null
+++ b/new/b.py
@@ -0,0 +1 @@
+fresh
diff --git a/old.py b/old.py
deleted file mode 100644
--- a/old.py
+++ /dev/null
@@ -1 +0,0 @@
-gone
"""


@pytest.fixture
def tree(work: Path) -> Path:
    (work / "src").mkdir()
    (work / "src/a.py").write_text("one\ntwo\nthree\n")
    (work / "old.py").write_text("gone\n")
    return work


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


async def test_a_patch_is_applied_and_undone(stub: FileServiceStub, tree: Path) -> None:
    report = await patch(stub, ".", _PATCH, dry_run=True)
    assert report.applied
    assert names(tree) == ["old.py", "src/a.py"]
    report = await patch(stub, ".", _PATCH)
    assert report.applied
    assert [(f.path, f.action) for f in report.files] == [
        ("src/a.py", file_pb2.PATCH_ACTION_MODIFY),
        ("new/b.py", file_pb2.PATCH_ACTION_CREATE),
        ("old.py", file_pb2.PATCH_ACTION_DELETE),
    ]
    hunk = report.files[0].hunks[0]
    assert (hunk.number, hunk.applied, hunk.expected_line, hunk.applied_line, hunk.error) == (1, True, 1, 1, "")
    assert (tree / "src/a.py").read_text() == "one\nTWO\nthree\n"
    assert (tree / "new/b.py").stat().st_mode & 0o777 == 0o755
    assert names(tree) == ["new/b.py", "src/a.py"]
    assert (await patch(stub, ".", _PATCH, reverse=True)).applied
    assert names(tree) == ["old.py", "src/a.py"]
    assert not (tree / "new").exists()


async def test_what_does_not_fit_is_an_answer(stub: FileServiceStub, tree: Path) -> None:
    (tree / "src/a.py").write_text("one\n2\nthree\n")
    report = await patch(stub, str(tree), _PATCH)
    assert not report.applied
    assert report.files[0].hunks[0].error == "line 2: expected 'two', found '2'"
    assert names(tree) == ["old.py", "src/a.py"]
    report = await patch(stub, str(tree), _PATCH, partial=True)
    assert not report.applied
    assert names(tree) == ["new/b.py", "src/a.py"]


async def test_strip_zero_is_not_unset(stub: FileServiceStub, tree: Path) -> None:
    report = await patch(stub, ".", _PATCH, strip=0)
    assert [f.path for f in report.files] == ["b/src/a.py", "b/new/b.py", "a/old.py"]
    assert not report.applied


async def test_bad_patches(stub: FileServiceStub, tree: Path) -> None:
    with fails() as failure:
        await patch(stub, ".", _PATCH[:-8])
    assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PATCH_MALFORMED")
    assert failure.metadata["line"] == "19"
    with fails() as failure:
        await patch(stub, ".", b"")
    assert failure.reason == "PATCH_MALFORMED"
    with fails() as failure:
        await patch(stub, "missing", _PATCH)
    assert failure.reason == "FILE_NOT_FOUND"
    with fails() as failure:
        await patch(stub, "old.py", _PATCH)
    assert failure.reason == "NOT_A_DIRECTORY"


@pytest.mark.parametrize(
    ("old", "new"), [("a/../x", "b/../x"), ("a/out/x", "b/out/x"), ("a/up/work2/x", "b/up/work2/x")]
)
async def test_no_path_leaves_the_directory(stub: FileServiceStub, tree: Path, old: str, new: str) -> None:
    outside = tree.parent / "work2"
    outside.mkdir()
    (outside / "x").write_text("secret\n")
    (tree / "out").symlink_to(outside)
    (tree / "up").symlink_to("..")
    for text in [
        f"--- {old}\n+++ {new}\n@@ -1 +1 @@\n-secret\n+mine\n",
        f"--- /dev/null\n+++ {new}\n@@ -0,0 +1 @@\n+mine\n",
        f"--- {old}\n+++ /dev/null\n@@ -1 +0,0 @@\n-secret\n",
    ]:
        with fails() as failure:
            await patch(stub, ".", text.encode())
        assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "PATCH_PATH_ESCAPES")
    assert (outside / "x").read_text() == "secret\n"
    assert names(outside) == ["x"]


async def test_links_inside_are_followed(stub: FileServiceStub, tree: Path) -> None:
    (tree / "lib").symlink_to("src")
    text = b"--- a/lib/a.py\n+++ b/lib/a.py\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    assert (await patch(stub, ".", text)).applied
    assert (tree / "src/a.py").read_text() == "one\n2\nthree\n"


async def test_a_large_patch(stub: FileServiceStub, tree: Path) -> None:
    lines = b"".join(b"+line %d\n" % number for number in range(800_000))
    report = await patch(stub, ".", b"--- /dev/null\n+++ b/large\n@@ -0,0 +1,800000 @@\n" + lines)
    assert report.applied
    assert (tree / "large").stat().st_size > 8_000_000


@pytest.mark.parametrize(("function", "failing"), [("rename", 1), ("rename", 2), ("rename_into_free_name", 1)])
async def test_a_failure_half_way_rolls_all_back(
    stub: FileServiceStub, tree: Path, monkeypatch: pytest.MonkeyPatch, function: str, failing: int
) -> None:
    """The n-th rename of the commit fails, as on a disk that breaks: of the removal, the replacement, the new file."""
    before = {name: (tree / name).read_bytes() for name in names(tree)}
    calls = 0
    module = placing.os if function == "rename" else placing
    real = getattr(module, function)

    def breaking(*args: object, **kwargs: object) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise OSError(errno.EIO, "broken")
        real(*args, **kwargs)

    monkeypatch.setattr(module, function, breaking)
    with fails() as failure:
        await patch(stub, ".", _PATCH)
    assert failure.reason == "FILE_IO_ERROR"
    assert {name: (tree / name).read_bytes() for name in names(tree)} == before
    assert not (tree / "new").exists()


async def test_a_file_that_changes_meanwhile_is_not_overwritten(
    stub: FileServiceStub, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = patching.make_plan

    def planning(*args: object) -> object:
        made = plan(*args)  # type: ignore[arg-type]
        (tree / "src/a.py").write_text("someone else was here\n")
        return made

    monkeypatch.setattr(patching, "make_plan", planning)
    with fails() as failure:
        await patch(stub, ".", _PATCH)
    assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, "CHANGED_MEANWHILE")
    assert failure.metadata["path"] == f"{tree}/src/a.py"
    assert (tree / "src/a.py").read_text() == "someone else was here\n"
    assert names(tree) == ["old.py", "src/a.py"]


async def test_an_archive_goes_up_and_down(stub: FileServiceStub, tree: Path) -> None:
    (tree / "link").symlink_to("src")
    (tree / os.fsdecode(b"\xff")).write_text("x")
    stream = await download(stub, ".")
    result = await upload(stub, "copy/deep", stream)
    assert (result.entries, result.size) == (5, 20)
    assert names(tree / "copy/deep") == [n for n in names(tree) if not n.startswith("copy")]
    assert (tree / "copy/deep/link").is_symlink()
    with fails() as failure:
        await download(stub, "missing")
    assert failure.reason == "FILE_NOT_FOUND"
    with fails() as failure:
        await upload(stub, "src", b"x" * 1024)
    assert failure.reason == "ARCHIVE_MALFORMED"
    with fails() as failure:
        await upload(stub, "old.py", stream)
    assert failure.reason == "NOT_A_DIRECTORY"
