"""A tree in memory for make_plan, and the real tools to compare with."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Container
from pathlib import Path

from services.exec_agent.files.patch import Entry, Options, Plan, make_plan, parse

GIT_ENV = {
    **{key: value for key, value in os.environ.items() if not key.startswith("GIT_")},
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_CEILING_DIRECTORIES": "/",
    "LC_ALL": "C",
}


class MemoryTree:
    def __init__(self, files: dict[bytes, Entry]) -> None:
        self.files = files

    def read(self, path: bytes) -> Entry | None:
        return self.files.get(path)

    def holds_others(self, path: bytes, removed: Container[bytes]) -> bool | None:
        inside = [name for name in self.files if name.startswith(path + b"/")]
        return any(name not in removed for name in inside) if inside else None


def entry(data: bytes, mode: int = 0o644) -> Entry:
    return Entry(data, stat.S_IFREG | mode)


def apply(
    files: dict[bytes, Entry], text: bytes, *, strip: int | None = None, options: Options | None = None
) -> tuple[Plan, dict[bytes, Entry]]:
    plan = make_plan(parse(text, strip), MemoryTree(files), options or Options())
    after = dict(files)
    for change in plan.changes:
        if change.after is None:
            del after[change.path]
        else:
            after[change.path] = change.after
    return plan, after


def apply_to(content: bytes, text: bytes, **options: object) -> tuple[Plan, bytes]:
    plan, after = apply({b"f": entry(content)}, text, options=Options(**options))  # type: ignore[arg-type]
    return plan, after[b"f"].data


def run(*argv: str, cwd: Path, stdin: bytes = b"", ok: tuple[int, ...] = (0,)) -> bytes:
    done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, env=GIT_ENV, timeout=60)
    assert done.returncode in ok, done.stderr.decode()
    return done.stdout


def diff(old: bytes, new: bytes, folder: Path, context: int = 3, ok: tuple[int, ...] = (0, 1)) -> bytes:
    (folder / "old").write_bytes(old)
    (folder / "new").write_bytes(new)
    return run("diff", "-a", f"-U{context}", "--label", "a/f", "--label", "b/f", "old", "new", cwd=folder, ok=ok)


def snapshot(folder: Path) -> dict[str, tuple[str, bytes]]:
    """Every file and link below a folder, .git left out: whether it can be executed or is a link, and its content."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name == ".git" or name.startswith(".git/"):
            continue
        if path.is_symlink():
            found[name] = ("link", os.fsencode(path.readlink()))
        elif path.is_file():
            found[name] = ("x" if path.stat().st_mode & 0o111 else "-", path.read_bytes())
    return found
