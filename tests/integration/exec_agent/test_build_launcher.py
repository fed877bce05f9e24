"""scripts/build-launcher on machines with and without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.exec_agent.conftest import ROOT

# What the script itself needs, without any compiler.
_TOOLS = ("bash", "cat", "chmod", "cut", "dirname", "mkdir", "mktemp", "mv", "rm", "sha256sum", "uname")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The launcher's part of a checkout, in which nothing was built or installed."""
    shutil.copytree(ROOT / "services/exec_agent/launcher", tmp_path / "services/exec_agent/launcher")
    (tmp_path / "scripts").mkdir()
    for name in ("build-launcher", "ziglang-version"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "tools").mkdir()
    for name in _TOOLS:
        (tmp_path / "tools" / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def build(checkout: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or str(checkout / "tools")}
    command = [str(checkout / "scripts/build-launcher"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_without_a_compiler_it_says_what_to_do(checkout: Path) -> None:
    done = build(checkout)
    assert done.returncode == 1
    assert "apt-get install gcc" in done.stderr
    assert "pip install ziglang==" in done.stderr
    assert not list((checkout / "build").iterdir())


def test_where_it_is_optional_nothing_stale_stays(checkout: Path) -> None:
    (checkout / "build").mkdir()
    (checkout / "build" / "launcher").write_text("of other sources")
    done = build(checkout, "--optional")
    assert done.returncode == 0
    assert "going on without" in done.stderr
    assert not list((checkout / "build").iterdir())


def compiler(checkout: Path, script: str) -> None:
    (checkout / "tools" / "cc").write_text(f"#!/bin/sh\n{script}\n")
    (checkout / "tools" / "cc").chmod(0o755)


def test_a_compiler_that_cannot_link_statically_is_none(checkout: Path) -> None:
    compiler(checkout, "echo 'cannot find -lc' >&2; exit 1")
    assert build(checkout).returncode == 1
    assert build(checkout, "--optional").returncode == 0


def test_sources_that_do_not_compile_are_never_optional(checkout: Path) -> None:
    # By the folder of the sources: what is made has a random name, which may begin with "launcher.c" too.
    refuses = 'echo "launcher.c:1: error" >&2; exit 1'
    compiler(checkout, f'case "$*" in *exec_agent/launcher/*) {refuses};; *) cat >/dev/null;; esac')
    done = build(checkout, "--optional")
    assert done.returncode == 1
    assert "launcher.c:1: error" in done.stderr


def test_with_a_compiler_it_builds_once(checkout: Path) -> None:
    assert build(checkout, "--optional", path=os.environ["PATH"]).returncode == 0
    built = checkout / "build" / "launcher"
    before = built.stat().st_mtime_ns
    assert build(checkout, path=os.environ["PATH"]).returncode == 0
    assert built.stat().st_mtime_ns == before
    assert subprocess.run([built, "nonsense"], capture_output=True, timeout=110).returncode == 2


@pytest.mark.parametrize("arguments", [["--arch"], ["--nonsense"], ["extra"]])
def test_bad_arguments_are_explained(checkout: Path, arguments: list[str]) -> None:
    done = build(checkout, *arguments)
    assert done.returncode == 2
    assert "usage" in done.stderr
