"""What payload and service images are both made with: folders that are copied, compiled and made anew when needed."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from payload.sources import ROOT

# Of the standard library: what an agent without a terminal, a display or a database never imports.
NOT_OF_STDLIB = (
    *("__pycache__", "config-*", "lib-dynload", "site-packages", "dist-packages", "sitecustomize.py", "LICENSE.txt"),
    *("test", "unittest", "doctest.py", "idlelib", "lib2to3", "distutils", "ensurepip", "venv", "pydoc*", "pdb.py"),
    *("tkinter", "turtle*", "curses", "sqlite3", "dbm", "msilib", "wsgiref", "xmlrpc", "_sysconfigdata*", "*.so"),
)
LICENCE = re.compile(r"licen[cs]e|copying|notice|authors", re.IGNORECASE)


def own_modules(entries: Iterable[str]) -> Iterator[Path]:
    """Every file of ours that these modules are and import, at their start or later."""
    tops = {"services": ROOT, "orchard": ROOT / "clients/python/src"}
    seen: set[Path] = set()
    todo = list(entries)
    while todo:
        parts = todo.pop().split(".")
        if parts[0] not in tops:
            continue
        for depth in range(1, len(parts) + 1):
            path = tops[parts[0]].joinpath(*parts[:depth])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            if file in seen or not file.is_file():
                continue
            seen.add(file)
            if file != tops["orchard"] / "orchard/__init__.py":  # its re-exports load the SDK, and only when asked
                todo += imports_of(file)
    yield from sorted(seen)


def imports_of(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def put(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def strip_symbols(folder: Path) -> None:
    """Packages carry symbols for debuggers, up to nine tenths of a file."""
    if shutil.which("strip"):
        subprocess.run(["strip", "--strip-unneeded", *sorted(folder.rglob("*.so"))], check=True)


def compile_all(folder: Path) -> None:
    """Bytecode that is taken as it is: the payload is read-only, and times of files differ between copies."""
    subprocess.run(
        [
            *(sys.executable, "-I", "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"),
            *("-s", folder.parent, "-p", "/", folder),
        ],
        env={"PYTHONHASHSEED": "0", "PATH": os.environ["PATH"]},
        check=True,
    )


def stamp(arch: str, files: Iterable[Path]) -> str:
    """Changes with everything that something is made of."""
    digest = hashlib.sha256(f"{arch} {sys.version}".encode())
    for path in files:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class Made:
    """Something in build/ that is made anew when what it is made of has changed."""

    def __init__(self, path: Path, current: str) -> None:
        self.path, self._current = path, current
        self._marker = path.with_name(f"{path.name}.stamp")

    def is_current(self) -> bool:
        return self.path.exists() and self._marker.is_file() and self._marker.read_text() == self._current

    @contextlib.contextmanager
    def replaced(self) -> Iterator[Path]:
        """A new path that takes its place in the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.path.parent, prefix=".new-") as work:
            made = Path(work, self.path.name)
            yield made
            self._marker.unlink(missing_ok=True)
            if self.path.exists():
                self.path.rename(Path(work, "old"))
            made.rename(self.path)
        self._marker.write_text(self._current)
