"""Builds of this repository's history, for tests in which one of them meets today's."""

from __future__ import annotations

import fcntl
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[2]
# As old as agents may be with gateways of this version (services/common/versions.py): move it with that.
OLDEST: Final = "e4ccefc36e7a0ccd654376735ebdd1501110347a"
# The build before this one, with every call of the contract: move it with each release.
PREVIOUS: Final = "050ae88af37f6531409d583be11f10142689b349"
_PARTS = ("services", "clients", "scripts", "LICENSE", "requirements.lock")
"""What a build is made of: no tests."""


def earlier_build(commit: str) -> Path:
    """The code of a commit, with its launcher built: in build/earlier, made once."""
    if not (ROOT / ".git").exists():
        pytest.skip(f"the earlier build, commit {commit}, is in this repository's history: use a git checkout")
    folder = ROOT / "build/earlier"
    folder.mkdir(parents=True, exist_ok=True)
    tree = folder / commit
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tree.exists():
            with tempfile.TemporaryDirectory(dir=folder, prefix=".new-") as work:
                made = Path(work, commit)
                made.mkdir()
                _extract(commit, made)
                made.rename(tree)
    return tree


def _extract(commit: str, folder: Path) -> None:
    archive = subprocess.run(["git", "-C", ROOT, "archive", commit, *_PARTS], capture_output=True)
    if archive.returncode != 0:
        pytest.fail(
            f"this clone lacks commit {commit}, the earlier build that today's is to work with: fetch the whole"
            f" history (git fetch --unshallow). {archive.stderr.decode().strip()}"
        )
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
    subprocess.run(["scripts/build-launcher"], cwd=folder, check=True)


def import_path(tree: Path) -> dict[str, str]:
    """The environment in which Python runs the code of a tree, in place of this checkout's."""
    return {"PYTHONPATH": f"{tree}:{tree}/clients/python/src"}
