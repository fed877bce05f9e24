"""Walking, removing and writing below the service: races, batches, file systems that cannot do everything."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from services.common.errors import AlreadyExistsError, NotFoundError, OrchardError, PermissionDeniedError
from services.exec_agent.files import paths, writing
from services.exec_agent.files.archive.pack import pack
from services.exec_agent.files.errors import file_error
from services.exec_agent.files.moving import move as move_with
from services.exec_agent.files.removing import remove
from services.exec_agent.files.tree import Cursor, walk
from services.exec_agent.files.writing import FileWriter, WriteOptions
from tests.support.intents import intents
from tests.unit.exec_agent_files.test_patch_git import patch_tree
from tests.unit.exec_agent_files.test_unpack import FILE, make, unpack


def move(source: bytes, target: bytes, *, overwrite: bool) -> None:
    with intents() as noted:
        move_with(source, target, overwrite=overwrite, intents=noted)


def default_owner() -> tuple[int, int]:
    return os.getuid(), os.getgid()


def cursor(path: Path) -> Cursor:
    return Cursor(os.open(path, os.O_RDONLY | os.O_DIRECTORY))


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_walks_resume_anywhere(tmp_path: Path, batch: int) -> None:
    for name in ["a/x/1", "a/x/2", "a/y", "a.b", "ab/1", "b"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with cursor(tmp_path) as top:
        whole = [node.path for node in walk(top, recursive=True, batch=batch)]
    assert whole == [b"a", b"a/x", b"a/x/1", b"a/x/2", b"a/y", b"a.b", b"ab", b"ab/1", b"b"]
    for position, path in enumerate(whole):
        with cursor(tmp_path) as top:
            assert [n.path for n in walk(top, recursive=True, after=path, batch=batch)] == whole[position + 1 :]
    # A position that is gone is between its neighbours.
    with cursor(tmp_path) as top:
        assert [n.path for n in walk(top, recursive=True, after=b"a/x/15/z", batch=batch)] == whole[3:]
    with cursor(tmp_path) as top:
        assert [n.path for n in walk(top, recursive=False, after=b"a.b", batch=batch)] == [b"ab", b"b"]


def test_a_directory_moved_away_during_a_walk_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "top/a/b").mkdir(parents=True)
    (tmp_path / "top/z").touch()
    with cursor(tmp_path / "top") as top:
        nodes = walk(top, recursive=True)
        assert next(nodes).path == b"a"
        assert next(nodes).path == b"a/b"
        (tmp_path / "top/a").rename(tmp_path / "elsewhere")
        with pytest.raises(OSError) as caught:
            list(nodes)
    assert caught.value.errno == errno.ESTALE


@pytest.mark.parametrize("operation", ["remove", "pack", "move"])
def test_a_link_swapped_in_at_the_worst_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """Between the look at a directory and the step into it, it becomes a link to the outside."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_text("kept")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub/f").touch()
    step = Cursor.enter

    def enter(self: Cursor, name: bytes) -> bool:
        if name == b"sub" and not (tree / "sub").is_symlink():
            (tree / "sub").rename(tmp_path / "away")
            (tree / "sub").symlink_to(tmp_path / "outside")
        return step(self, name)

    monkeypatch.setattr(Cursor, "enter", enter)
    if operation == "remove":
        remove(os.fsencode(tree), recursive=True, missing_ok=False)
        assert not tree.exists()
    elif operation == "pack":
        assert b"secret" not in b"".join(pack(os.fsencode(tree)))
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as other, suppress(OrchardError):
            move(os.fsencode(tree), os.fsencode(other) + b"/moved", overwrite=False)
            assert not list(Path(other).rglob("secret"))
    assert (tmp_path / "outside/secret").read_text() == "kept"


_SWAPPER = """
import os, sys
directory, spare, outside = sys.argv[1:]
print("ready", flush=True)
while True:
    for call in (
        lambda: os.rename(directory, spare),
        lambda: os.symlink(outside, directory),
        lambda: os.unlink(directory),
        lambda: os.rename(spare, directory),
    ):
        try:
            call()
        except OSError:
            pass
"""


@contextmanager
def swapping(directory: Path, spare: Path, outside: Path) -> Iterator[None]:
    """Another process makes `directory` a link to the outside and a directory again, over and over."""
    argv = [sys.executable, "-c", _SWAPPER, str(directory), str(spare), str(outside)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("operation", ["unpack", "patch"])
def test_a_link_swapped_in_leads_nowhere(tmp_path: Path, operation: str) -> None:
    outside, tree, built = tmp_path / "outside", tmp_path / "tree", tmp_path / "built"
    names = [f"f{number}" for number in range(20)]
    outside.mkdir()
    for name in names:
        (outside / name).write_text("kept\n")
    stream = make(*((f"sub/{name}", FILE, "mine") for name in names))
    text = b"".join(b"--- a/sub/f%d\n+++ b/sub/f%d\n@@ -1 +1 @@\n-kept\n+mine\n" % (n, n) for n in range(20))
    with swapping(tree / "sub", tree / "spare", outside):
        for _ in range(40):
            tree.mkdir(exist_ok=True)
            built.mkdir(exist_ok=True)
            for name in names:
                (built / name).write_text("kept\n")
            with suppress(OSError):
                built.rename(tree / "sub")
            with suppress(OrchardError):
                if operation == "unpack":
                    unpack(tree, stream)
                elif operation == "patch":
                    patch_tree(tree, text)
                remove(os.fsencode(tree), recursive=True, missing_ok=True)
            assert {path.name: path.read_text() for path in outside.iterdir()} == dict.fromkeys(names, "kept\n")


@pytest.fixture(params=["nameless", "named"])
def flavour(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Temporary files without a name, and those of a file system that cannot do that."""
    if request.param == "named":
        monkeypatch.setattr(writing.os, "O_TMPFILE", os.O_DIRECTORY)
    return request.param


def writer(path: Path, **options: object) -> FileWriter:
    return FileWriter(os.fsencode(path), WriteOptions(**options), default_owner)  # type: ignore[arg-type]


def test_a_file_appears_whole(tmp_path: Path, flavour: str) -> None:
    (tmp_path / "f").write_text("old")
    file = writer(tmp_path / "f")
    file.open()
    file.write([b"ne", b"", b"w"])
    assert (tmp_path / "f").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == (2 if flavour == "named" else 1)
    assert file.finish() == 3
    assert (tmp_path / "f").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_an_aborted_file_leaves_nothing(tmp_path: Path, flavour: str) -> None:
    file = writer(tmp_path / "a/b/f", make_parents=True)
    file.open()
    file.write([b"x" * 100_000])
    file.abort()
    file.abort()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_folder_that_another_file_takes_along_is_made_again(tmp_path: Path, flavour: str, exclusive: bool) -> None:
    given_up = writer(tmp_path / "made/below/a", make_parents=True)
    kept = writer(tmp_path / "made/below/b", make_parents=True, exclusive=exclusive)
    for file in (given_up, kept):
        file.open()
    kept.write([b"x"])
    given_up.abort()
    assert kept.finish() == 1
    # Whatever comes too late finds nothing that it may take along.
    for file in (kept, given_up):
        file.abort()
    assert (tmp_path / "made/below/b").read_text() == "x"


def test_a_folder_may_go_when_it_was_just_found(tmp_path: Path, flavour: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, kept = (writer(tmp_path / f"made/{name}", make_parents=True) for name in ("a", "b"))
    given_up.open()

    def too_late(path: bytes) -> AbstractContextManager[int]:
        given_up.abort()
        return paths.open_directory(path)

    monkeypatch.setattr(writing, "open_directory", too_late)
    kept.open()
    kept.finish()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["b"]


def test_without_a_wish_for_folders_a_missing_one_is_an_error(tmp_path: Path, flavour: str) -> None:
    (tmp_path / "made").mkdir()
    file = writer(tmp_path / "made/f")
    file.open()
    for left in (tmp_path / "made").iterdir():
        left.unlink()
    (tmp_path / "made").rmdir()
    with pytest.raises(NotFoundError):
        file.finish()
    file.abort()
    assert not list(tmp_path.iterdir())


def test_a_name_taken_meanwhile_is_not_replaced(tmp_path: Path, flavour: str) -> None:
    file = writer(tmp_path / "f", exclusive=True)
    file.open()
    file.write([b"mine"])
    (tmp_path / "f").write_text("theirs")
    with pytest.raises(AlreadyExistsError):
        file.finish()
    file.abort()
    assert (tmp_path / "f").read_text() == "theirs"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("has_renameat2", [True, False])
def test_a_move_does_not_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool) -> None:
    if not has_renameat2:
        monkeypatch.setattr(paths, "_renameat2", lambda: None)
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    with pytest.raises(AlreadyExistsError):
        move(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "b"), overwrite=False)
    move(os.fsencode(tmp_path / "a"), os.fsencode(tmp_path / "c"), overwrite=False)
    assert (tmp_path / "c").read_text() == "a"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EDQUOT, "NO_SPACE"),
        (errno.ENOSPC, "NO_SPACE"),
        (errno.EROFS, "READ_ONLY_FILE_SYSTEM"),
        (errno.EMFILE, "AGENT_BUSY"),
        (errno.ETXTBSY, "FILE_BUSY"),
        (errno.ENOTRECOVERABLE, "INTERNAL"),
    ],
)
def test_errnos_have_reasons(number: int, reason: str) -> None:
    error = file_error(OSError(number, os.strerror(number)), b"/x/\xff")
    assert error.reason == reason
    assert error.metadata["path"] == "/x/\ufffd"


@pytest.mark.root
def test_without_permission(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    calls = [
        lambda: remove(os.fsencode(tmp_path / "secret"), recursive=False, missing_ok=True),
        lambda: writer(tmp_path / "new").open(),
        lambda: move(os.fsencode(tmp_path / "secret"), os.fsencode(tmp_path / "x"), overwrite=False),
        lambda: patch_tree(tmp_path, b"--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+x\n"),
        lambda: unpack(tmp_path, make(("new", FILE, "x"))),
    ]
    os.seteuid(12345)
    try:
        for call in calls:
            with pytest.raises(PermissionDeniedError) as caught:
                call()
            assert caught.value.reason == "FILE_PERMISSION_DENIED"
    finally:
        os.seteuid(0)
    assert [p.name for p in tmp_path.iterdir()] == ["secret"]
