"""Whole trees: what `git diff` writes of a change in a repository, applied by ours and by git apply."""

from __future__ import annotations

import os
import random
import shutil
import stat
from pathlib import Path

import pytest

from services.exec_agent.files.patch import Options
from services.exec_agent.files.patching import apply_patch
from tests.support.intents import intents
from tests.unit.exec_agent_files.support import run, snapshot


def _owner() -> tuple[int, int]:
    return os.getuid(), os.getgid()


def patch_tree(folder: Path, text: bytes, *, strip: int | None = None, dry_run: bool = False, **options: object):
    with intents() as noted:
        return apply_patch(
            os.fsencode(folder),
            text,
            strip=strip,
            dry_run=dry_run,
            options=Options(**options),  # type: ignore[arg-type]
            default_owner=_owner,
            intents=noted,
        )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "src/deep").mkdir(parents=True)
    text = "".join(f"line {number}\n" for number in range(1, 61))
    for name in [
        "src/one.py",
        "src/two.py",
        "src/deep/three.py",
        "old.txt",
        "with blank.txt",
        'quo"te\tand tab',
        "naïve.txt",
    ]:
        (folder / name).write_text(f"{name!r}\n{text}")
    (folder / "crlf.txt").write_bytes(text.replace("\n", "\r\n").encode())
    (folder / "empty").touch()
    (folder / "script.sh").write_text("#!/bin/sh\n")
    (folder / "no newline").write_text("a\nb")
    (folder / "image.bin").write_bytes(random.Random(1).randbytes(9000))
    (folder / "link").symlink_to("src/one.py")
    run("git", "init", "-q", cwd=folder)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    run("git", "add", "-A", cwd=folder)
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.com"]
    run("git", *identity, "commit", "-q", "--allow-empty", "-m", "c", cwd=folder)


def change_modify(folder: Path) -> None:
    path = folder / "src/one.py"
    path.write_text(path.read_text().replace("line 7\n", "seven\n").replace("line 40\n", "forty\nand more\n"))


def change_create_and_delete(folder: Path) -> None:
    (folder / "new/sub").mkdir(parents=True)
    (folder / "new/sub/file").write_text("fresh\n")
    (folder / "new/empty").touch()
    (folder / "src/deep/three.py").unlink()
    (folder / "empty").unlink()


def change_modes(folder: Path) -> None:
    (folder / "script.sh").chmod(0o755)
    (folder / "new.sh").write_text("#!/bin/sh\n")
    (folder / "new.sh").chmod(0o755)


def change_rename(folder: Path) -> None:
    (folder / "moved").mkdir()
    (folder / "old.txt").rename(folder / "moved/renamed.txt")
    (folder / "src/two.py").rename(folder / "src/2.py")
    text = (folder / "src/2.py").read_text()
    (folder / "src/2.py").write_text(text.replace("line 9\n", "nine\n"))


def change_swap(folder: Path) -> None:
    (folder / "src/one.py").rename(folder / "spare")
    (folder / "old.txt").rename(folder / "src/one.py")
    (folder / "spare").rename(folder / "old.txt")


def change_copy(folder: Path) -> None:
    text = (folder / "old.txt").read_text()
    (folder / "copied.txt").write_text(text + "and one more\n")
    (folder / "old.txt").write_text(text + "changed too\n")


def change_names(folder: Path) -> None:
    for name in ["with blank.txt", 'quo"te\tand tab', "naïve.txt"]:
        path = folder / name
        path.write_text(path.read_text().replace("line 30\n", "thirty\n"))
    (folder / "with blank.txt").rename(folder / "two  blanks .txt")
    (folder / "new with blank").touch()
    (Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xfe"))).write_bytes(b"no utf-8\n")


def change_line_ends(folder: Path) -> None:
    data = (folder / "crlf.txt").read_bytes()
    (folder / "crlf.txt").write_bytes(data.replace(b"line 5\r\n", b"five\r\n"))
    (folder / "no newline").write_text("a\nB")


def change_add_newline(folder: Path) -> None:
    (folder / "no newline").write_text("a\nb\n")
    (folder / "script.sh").write_text("#!/bin/sh")


def change_links(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").symlink_to("old.txt")
    (folder / "new link").symlink_to("/nowhere")
    (folder / "script.sh").unlink()
    (folder / "script.sh").symlink_to("empty")


def change_binary(folder: Path) -> None:
    data = bytearray((folder / "image.bin").read_bytes())
    data[4000:4003] = b"new"
    (folder / "image.bin").write_bytes(data)
    (folder / "other.bin").write_bytes(random.Random(2).randbytes(3000))


def change_binary_wholly(folder: Path) -> None:
    (folder / "image.bin").write_bytes(b"\0\1\2" * 50)


def change_binary_rename(folder: Path) -> None:
    (folder / "image.bin").rename(folder / "picture.bin")
    with (folder / "picture.bin").open("ab") as file:
        file.write(b"tail\0")


def change_binary_delete(folder: Path) -> None:
    (folder / "image.bin").unlink()


def change_file_to_directory(folder: Path) -> None:
    (folder / "old.txt").unlink()
    (folder / "old.txt").mkdir()
    (folder / "old.txt/inside").write_text("x\n")


def change_directory_to_file(folder: Path) -> None:
    shutil.rmtree(folder / "src/deep")
    (folder / "src/deep").write_text("flat\n")


def change_copy_after_its_source(folder: Path) -> None:
    """The copy comes later in the diff than the change of what it was copied from."""
    text = (folder / "old.txt").read_text()
    (folder / "zcopied.txt").write_text(text)
    (folder / "old.txt").write_text(text + "changed too\n")


def change_rename_into_directory_of_its_name(folder: Path) -> None:
    (folder / "old.txt").rename(folder / "spare")
    (folder / "old.txt").mkdir()
    (folder / "spare").rename(folder / "old.txt/inside")


def change_link_to_directory(folder: Path) -> None:
    (folder / "link").unlink()
    (folder / "link").mkdir()
    (folder / "link/inside").write_text("x\n")


def change_directory_to_link(folder: Path) -> None:
    shutil.rmtree(folder / "src/deep")
    (folder / "src/deep").symlink_to("..")


CHANGES = [value for name, value in sorted(globals().items()) if name.startswith("change_")]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.removeprefix("change_"))
@pytest.mark.parametrize("flavour", ["-M -C", "--no-renames", "--no-prefix", "-U0", "-U20"])
def test_does_what_git_does(repository: Path, tmp_path: Path, change, flavour: str) -> None:
    before = snapshot(repository)
    change(repository)
    after = snapshot(repository)
    run("git", "add", "-A", cwd=repository)
    text = run("git", "diff", "--binary", "--cached", *flavour.split(), cwd=repository)
    run("git", "reset", "-q", "--hard", cwd=repository)
    run("git", "clean", "-qfd", cwd=repository)
    assert snapshot(repository) == before
    ours = tmp_path / "ours"
    shutil.copytree(repository, ours, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    strip = 0 if flavour == "--no-prefix" else None

    dry = patch_tree(ours, text, strip=strip, dry_run=True)
    assert dry.fits, dry.results
    assert snapshot(ours) == before

    assert patch_tree(ours, text, strip=strip).fits
    assert snapshot(ours) == after
    if flavour not in {"-U0", "--no-prefix"}:
        run("git", "apply", "-", cwd=repository, stdin=text)
        assert snapshot(repository) == after

    undone = patch_tree(ours, text, strip=strip, reverse=True)
    assert undone.fits, undone.results
    assert snapshot(ours) == before
    assert not list(ours.rglob(".orchard-*"))


def test_a_series_of_commits(repository: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    shutil.copytree(repository, ours, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    for change in [change_modify, change_rename, change_binary, change_create_and_delete, change_names]:
        change(repository)
        commit(repository)
    (repository / "src/2.py").rename(repository / "src/two.py")
    commit(repository)
    text = run("git", "format-patch", "--stdout", "--binary", "HEAD~6", cwd=repository)
    before = snapshot(ours)
    plan = patch_tree(ours, text)
    assert plan.fits, plan.results
    assert snapshot(ours) == snapshot(repository)
    assert patch_tree(ours, text, reverse=True).fits
    assert snapshot(ours) == before


def test_a_copy_in_a_later_commit_means_the_file_of_that_commit(repository: Path, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    shutil.copytree(repository, ours, symlinks=True, ignore=shutil.ignore_patterns(".git"))
    with (repository / "old.txt").open("a") as file:
        file.write("changed\n")
    commit(repository)
    shutil.copy(repository / "old.txt", repository / "zcopied.txt")
    commit(repository)
    text = run("git", "log", "-p", "--reverse", "-2", "-C", "--find-copies-harder", cwd=repository)
    assert b"copy from old.txt" in text
    before = snapshot(ours)
    plan = patch_tree(ours, text)
    assert plan.fits, plan.results
    assert snapshot(ours) == snapshot(repository)
    assert patch_tree(ours, text, reverse=True).fits
    assert snapshot(ours) == before


def test_a_removed_binary_file_needs_no_data(repository: Path) -> None:
    before = snapshot(repository)
    change_binary_delete(repository)
    text = run("git", "diff", "--full-index", cwd=repository)
    run("git", "checkout", "-q", ".", cwd=repository)
    assert patch_tree(repository, text).fits
    assert snapshot(repository) == {name: entry for name, entry in before.items() if name != "image.bin"}
    assert not patch_tree(repository, text, reverse=True).fits
    (repository / "image.bin").write_bytes(b"\0another")
    assert "not the one" in patch_tree(repository, text).results[0].error


def test_a_directory_with_other_files_is_an_answer(repository: Path) -> None:
    change_directory_to_file(repository)
    run("git", "add", "-A", cwd=repository)
    text = run("git", "diff", "--cached", cwd=repository)
    run("git", "reset", "-q", "--hard", cwd=repository)
    (repository / "src/deep/precious").write_text("keep\n")
    before = snapshot(repository)
    for dry_run in (True, False):
        plan = patch_tree(repository, text, dry_run=dry_run)
        assert [result.error for result in plan.results if result.error] == [
            "it is a directory, and the patch does not remove all that is in it"
        ]
        assert snapshot(repository) == before
    assert not patch_tree(repository, text, partial=True).fits
    assert snapshot(repository) == {name: entry for name, entry in before.items() if name != "src/deep/three.py"}


def test_what_waits_for_a_removal_that_fails_is_not_made(repository: Path) -> None:
    """In part: a file is not made below or in the place of one that stays."""
    change_file_to_directory(repository)
    run("git", "add", "-A", cwd=repository)
    text = run("git", "diff", "--cached", cwd=repository)
    run("git", "reset", "-q", "--hard", cwd=repository)
    (repository / "old.txt").write_text("another content\n")
    before = snapshot(repository)
    plan = patch_tree(repository, text, partial=True)
    assert [bool(result.error) or not result.fits for result in plan.results] == [True, True]
    assert snapshot(repository) == before


def test_plain_diffs_with_timestamps(repository: Path, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(repository, old, symlinks=True, ignore=shutil.ignore_patterns(".git", "*.bin", "link"))
    shutil.copytree(old, new, symlinks=True)
    for change in [change_modify, change_line_ends]:
        change(new)
    (new / "added here").write_text("1\n2\n")
    (new / "old.txt").unlink()
    text = run("diff", "-ruN", "old", "new", cwd=tmp_path, ok=(1,))
    before = snapshot(old)
    plan = patch_tree(old, text)
    assert plan.fits, plan.results
    assert snapshot(old) == snapshot(new)
    assert patch_tree(old, text, reverse=True).fits
    assert snapshot(old) == before


def test_modes_and_owners_stay(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a\n")
    (tmp_path / "f").chmod(0o4751)
    text = b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"
    assert patch_tree(tmp_path, text).fits
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o4751
    text = b"diff --git a/f b/f\nold mode 100755\nnew mode 100644\n"
    assert patch_tree(tmp_path, text).fits
    assert stat.S_IMODE((tmp_path / "f").stat().st_mode) == 0o4640


def test_a_submodule_is_reported(tmp_path: Path) -> None:
    text = (
        b"diff --git a/sub b/sub\nindex 1111111..2222222 160000\n--- a/sub\n+++ b/sub\n@@ -1 +1 @@\n"
        b"-Subproject commit 1111111\n+Subproject commit 2222222\n"
    )
    plan = patch_tree(tmp_path, text)
    assert not plan.fits
    assert "submodule" in plan.results[0].error


def test_binary_patch_for_another_content(repository: Path, tmp_path: Path) -> None:
    change_binary(repository)
    text = run("git", "diff", "--binary", cwd=repository)
    (tmp_path / "image.bin").write_bytes(b"something else")
    plan = patch_tree(tmp_path, text)
    assert "not the one that the binary patch was made from" in plan.results[0].error
    text = run("git", "diff", cwd=repository)
    plan = patch_tree(tmp_path, text)
    assert "git diff --binary" in plan.results[0].error
