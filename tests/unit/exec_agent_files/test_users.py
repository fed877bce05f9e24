from __future__ import annotations

from pathlib import Path

import pytest

from services.common.errors import FailedPreconditionError
from services.exec_agent.users import ResolvedUser, resolve_user

_PASSWD = """\
root:x:0:0:root:/root:/bin/bash
# a comment
broken line
ana:x:1000:1000:Ana,,,:/home/ana:/bin/zsh
bo:x:1001:100::/home/bo:
42:x:4242:4242::/home/42:/bin/sh
"""
_GROUP = """\
root:x:0:
users:x:100:
wheel:x:10:root,ana
docker:x:998:ana,bo
"""


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(_PASSWD)
    (tmp_path / "etc/group").write_text(_GROUP)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root", ResolvedUser(0, 0, (0, 10), "root", "/root", "/bin/bash")),
        ("ana", ResolvedUser(1000, 1000, (10, 998, 1000), "ana", "/home/ana", "/bin/zsh")),
        ("1000", ResolvedUser(1000, 1000, (10, 998, 1000), "ana", "/home/ana", "/bin/zsh")),
        ("bo", ResolvedUser(1001, 100, (100, 998), "bo", "/home/bo", "/bin/sh")),
        ("ana:users", ResolvedUser(1000, 100, (100,), "ana", "/home/ana", "/bin/zsh")),
        ("ana:55", ResolvedUser(1000, 55, (55,), "ana", "/home/ana", "/bin/zsh")),
        ("7:8", ResolvedUser(7, 8, (8,), "7", None, "/bin/sh")),
        ("7", ResolvedUser(7, 0, (0,), "7", None, "/bin/sh")),
        ("42", ResolvedUser(4242, 4242, (4242,), "42", "/home/42", "/bin/sh")),
    ],
)
def test_finds_a_user(root: str, text: str, expected: ResolvedUser) -> None:
    assert resolve_user(text, root) == expected


@pytest.mark.parametrize(
    "text", ["", ":", "nobody", "ana:", ":users", "ana:nogroup", "4294967295", "-1", "99999999999"]
)
def test_an_unknown_user_is_named(root: str, text: str) -> None:
    with pytest.raises(FailedPreconditionError) as caught:
        resolve_user(text, root)
    assert caught.value.reason == "USER_NOT_FOUND"
    assert caught.value.metadata["user"] == text


def test_numbers_need_no_files_at_all(tmp_path: Path) -> None:
    assert resolve_user("1000:1000", str(tmp_path)).gid == 1000
    with pytest.raises(FailedPreconditionError):
        resolve_user("root", str(tmp_path))


def test_links_resolve_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("evil:x:0:0::/:/bin/sh\n")
    root = tmp_path / "root"
    (root / "nix").mkdir(parents=True)
    (root / "etc").symlink_to("/nix")
    (root / "nix/real").write_text("ana:x:5:5::/:/bin/sh\n")
    (root / "nix/passwd").symlink_to("../../../nix/real")
    (root / "nix/group").symlink_to(str(tmp_path / "outside"))
    assert resolve_user("ana", str(root)).uid == 5
    (root / "nix/passwd").unlink()
    (root / "nix/passwd").symlink_to(str(tmp_path / "outside"))
    with pytest.raises(FailedPreconditionError):
        resolve_user("evil", str(root))


def test_link_loops_and_pipes_are_no_user(tmp_path: Path) -> None:
    import os

    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to("passwd")
    os.mkfifo(tmp_path / "etc/group")
    with pytest.raises(FailedPreconditionError):
        resolve_user("ana", str(tmp_path))
    with pytest.raises(FailedPreconditionError):
        resolve_user("5:staff", str(tmp_path))
