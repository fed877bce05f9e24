import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.local.supervisor.directories import (
    DataDirectory,
    default_data_directory,
    make_run_directory,
    remove_run_directory,
    run_directory_of,
)
from services.local.supervisor.errors import PlatformError


def test_the_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/u")
    assert default_data_directory({}) == Path("/home/u/.local/share/orchard")
    assert default_data_directory({"XDG_DATA_HOME": "relative"}) == Path("/home/u/.local/share/orchard")
    assert default_data_directory({"XDG_DATA_HOME": "/x"}) == Path("/x/orchard")
    assert default_data_directory({"XDG_DATA_HOME": "/x", "ORCHARD_DATA_DIR": "/d"}) == Path("/d")


def test_it_is_made_private_and_belongs_to_one(tmp_path: Path) -> None:
    path = tmp_path / "a" / "data"
    data = DataDirectory.open(path)
    try:
        assert data.path == path
        assert path.stat().st_mode & 0o777 == 0o700
        with pytest.raises(PlatformError, match="which is just starting"):
            DataDirectory.open(path)
        data.write_holder("127.0.0.1:7")
        with pytest.raises(PlatformError, match=rf"process {os.getpid()}, running since .*, endpoint 127\.0\.0\.1:7"):
            DataDirectory.open(path)
    finally:
        data.close()
    DataDirectory.open(path).close()


def test_another_that_starts_at_the_same_moment_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[DataDirectory] = []

    def another_starts(real: Callable[..., Any]) -> Callable[[Path], Any]:
        def look(path: Path) -> Any:
            seen = real(path)
            if path.is_relative_to(tmp_path):
                seen = seen if isinstance(seen, bool) else iter(list(seen))
                monkeypatch.undo()
                others.append(DataDirectory.open(tmp_path))
            return seen

        return look

    # Right after the first look at what the folder has, whichever that is.
    for name in ("exists", "iterdir"):
        monkeypatch.setattr(Path, name, another_starts(getattr(Path, name)))
    with pytest.raises(PlatformError, match="which is just starting"):
        DataDirectory.open(tmp_path)
    (other,) = others
    other.close()


@pytest.mark.parametrize("content", ["[]", "{", '{"pid": 1, "started": 1e300, "endpoint": ""}', '{"started": "x"}'])
def test_a_damaged_lock_file_is_no_problem(tmp_path: Path, content: str) -> None:
    data = DataDirectory.open(tmp_path)
    try:
        (tmp_path / "supervisor.lock").write_text(content)
        with pytest.raises(PlatformError, match="another `orchard up` uses"):
            DataDirectory.open(tmp_path)
    finally:
        data.close()


def test_an_open_mode_is_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    DataDirectory.open(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o700


def test_a_folder_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(PlatformError, match="not empty and no data directory"):
        DataDirectory.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="is not a folder"):
        DataDirectory.open(tmp_path / "file")


@pytest.mark.root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(PlatformError, match="belongs to user id 65534 and this is user id 0"):
        DataDirectory.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


async def test_leftover_processes_are_waited_for(tmp_path: Path) -> None:
    first = DataDirectory.open(tmp_path)
    leftover = os.dup(first.processes_fd)
    await first.wait_for_leftovers(lambda _: None)
    first.close()
    second = DataDirectory.open(tmp_path)
    said: list[str] = []
    waiting = asyncio.ensure_future(second.wait_for_leftovers(said.append))
    await asyncio.sleep(0)
    assert said
    assert not waiting.done()
    os.close(leftover)
    await asyncio.wait_for(waiting, 110)
    second.close()


def test_sockets_get_a_short_place(tmp_path: Path) -> None:
    data = tmp_path / ("long" * 60)
    place = run_directory_of(data, {})
    assert place == run_directory_of(data, {})
    assert place != run_directory_of(tmp_path, {})
    assert place.parent == Path("/tmp")
    assert len(str(place)) < 40
    # A runtime folder that is too long, relative, or not there is not used.
    long = tmp_path / ("r" * 60)
    long.mkdir()
    for unusable in (str(long), "relative", "/no/such/folder"):
        assert run_directory_of(data, {"XDG_RUNTIME_DIR": unusable}) == place


def test_the_place_of_sockets_is_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    os.close(make_run_directory(run))
    assert run.stat().st_mode & 0o777 == 0o700
    (tmp_path / "outside").write_text("keep")
    (run / "link").symlink_to(tmp_path / "outside")
    (run / "folder").mkdir(mode=0)
    held = make_run_directory(run)
    assert list(run.iterdir()) == []
    # Whoever tidies up sees that it is in use.
    other = os.open(run, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    os.close(held)
    remove_run_directory(run)
    remove_run_directory(run)
    assert not run.exists()
    assert (tmp_path / "outside").read_text() == "keep"


def test_a_link_or_an_open_folder_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir(mode=0o700)
    (tmp_path / "target" / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(PlatformError, match="not a folder of this user"):
        make_run_directory(tmp_path / "link")
    assert (tmp_path / "target" / "file").exists()
    (tmp_path / "target").chmod(0o755)
    with pytest.raises(PlatformError, match="open to other users"):
        make_run_directory(tmp_path / "target")
