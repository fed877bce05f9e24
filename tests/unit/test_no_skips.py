"""Skipped tests are seen: loudly anywhere, as failures in CI."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

def test_runs(): pass

def test_misses(): pytest.skip("no engine")

@pytest.mark.skipif(True, reason="no root")
def test_is_marked(): pass

@pytest.mark.xfail(reason="a known fault")
def test_fails(): assert False
"""


PYTEST = (sys.executable, "-m", "pytest", "-ra", "-p", "tests.support.no_skips", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("ci", "outcome"),
    [("", "1 passed, 2 skipped, 1 xfailed"), ("true", "1 failed, 1 passed, 1 xfailed, 1 error")],
)
def test_a_skipped_test_fails_in_ci(tmp_path: Path, ci: str, outcome: str) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    run = subprocess.run(
        [*PYTEST, f"--rootdir={tmp_path}", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=110,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "CI": ci, "PYTEST_ADDOPTS": ""},
    )
    assert outcome in run.stdout
    assert run.returncode == (1 if ci else 0)
    for reason in ("no engine", "no root"):
        assert reason in run.stdout
        assert (f"nothing is skipped in CI: {reason}" in run.stdout) == bool(ci)
