import os
from pathlib import Path

import pytest

from services.local.runtime import submounts


def test_what_is_mounted_below_a_folder() -> None:
    points = ["/", "/opt", "/opt/a b", "/opt/a b/c", "/opt/d", "/opt/d", "/optional", "/usr/opt/e"]
    assert submounts.below("/opt", points) == ("a b", "d")
    assert submounts.below("/usr", points) == ("opt/e",)
    assert submounts.below("/etc", points) == ()


def test_this_machine_has_its_root_mounted() -> None:
    assert "/" in submounts.mount_points()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    for name in ("conf.d/deep", "mounted/inside", "secret"):
        (folder / name).mkdir(parents=True)
    (folder / "conf.d" / "deep" / "file").write_text("text")
    (folder / "conf.d" / "deep" / "file").chmod(0o755)
    (folder / "conf.d").chmod(0o555)
    (folder / "hosts").write_text("mounted")
    (folder / "secret" / "key").write_text("key")
    (folder / "link").symlink_to("nowhere")
    os.mkfifo(folder / "pipe")
    return folder


def test_a_copy_has_what_is_neither_hidden_nor_mounted(folder: Path, tmp_path: Path) -> None:
    copying = submounts.small_enough(str(folder), ["secret"], ["mounted", "hosts"])
    assert copying is not None
    copying.copy(tmp_path / "copy")
    made = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*")}
    assert made == {"conf.d", "conf.d/deep", "conf.d/deep/file", "link", "mounted"}
    assert (tmp_path / "copy" / "conf.d" / "deep" / "file").read_text() == "text"
    assert (tmp_path / "copy" / "conf.d" / "deep" / "file").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "copy" / "conf.d").stat().st_mode & 0o777 == 0o555
    assert (tmp_path / "copy" / "link").readlink() == Path("nowhere")


def test_its_digest_tells_of_changes(folder: Path) -> None:
    def digest() -> str:
        copying = submounts.small_enough(str(folder), ["secret"], ["mounted"])
        assert copying is not None
        return copying.digest

    before = digest()
    (folder / "secret" / "key").write_text("another")
    (folder / "mounted" / "new").write_text("")
    assert digest() == before
    (folder / "hosts").write_text("changed")
    assert digest() != before


@pytest.mark.parametrize(("limit", "value"), [("_MOST_BYTES", 8), ("_MOST_ENTRIES", 3)])
def test_what_is_large_is_not_copied(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(submounts, limit, value)
    assert submounts.small_enough(str(folder), [], []) is None


def test_what_is_gone_by_the_time_is_left_out(folder: Path, tmp_path: Path) -> None:
    copying = submounts.small_enough(str(folder), [], [])
    assert copying is not None
    (folder / "hosts").unlink()
    copying.copy(tmp_path / "copy")
    assert not (tmp_path / "copy" / "hosts").exists()
    assert (tmp_path / "copy" / "secret" / "key").exists()
