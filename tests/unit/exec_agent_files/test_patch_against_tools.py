"""Random changes, diffed by the real tools, applied by ours and by the real tools: the same must come out."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.unit.exec_agent_files.support import GIT_ENV, apply_to, diff

_LINES = st.sampled_from(
    [b"a", b"b", b"c", b"", b"  x", b"\tindent", b"-minus", b"+plus", b"@@ at", b"\\ back", b"d\r"]
)
_SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, database=None)


@st.composite
def pairs(draw: st.DrawFn, unique: bool = False) -> tuple[bytes, bytes]:
    """A file, and the same after some edits."""
    count = draw(st.integers(0, 40))
    lines = [b"%d" % number for number in range(count)] if unique else draw(st.lists(_LINES, max_size=40))
    if unique:
        lines.append(b"last")
    new = list(lines)
    for _ in range(draw(st.integers(1, 5))):
        position = draw(st.integers(0, len(new)))
        removed = draw(st.integers(0, 3))
        new[position : position + removed] = draw(st.lists(_LINES, max_size=3))
    ends = st.just(b"\n") if unique else st.sampled_from([b"", b"\n"])
    return b"\n".join(lines) + draw(ends), b"\n".join(new) + draw(ends)


@_SETTINGS
@given(pairs(), st.sampled_from([0, 1, 3, 10]))
def test_diff_u_round_trips(pair: tuple[bytes, bytes], context: int) -> None:
    old, new = pair
    with tempfile.TemporaryDirectory() as folder:
        text = diff(old, new, Path(folder), context)
    assume(text)
    plan, result = apply_to(old, text)
    assert plan.fits, plan
    assert result == new
    plan, result = apply_to(new, text, reverse=True)
    assert plan.fits, plan
    assert result == old


@_SETTINGS
@given(pairs())
def test_git_diff_gives_what_git_apply_gives(pair: tuple[bytes, bytes]) -> None:
    old, new = pair
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "a").mkdir()
        (folder / "b").mkdir()
        (folder / "a/f").write_bytes(old)
        (folder / "b/f").write_bytes(new)
        command = ["git", "diff", "--no-index", "--no-prefix", "--text", "a/f", "b/f"]
        text = subprocess.run(command, cwd=folder, capture_output=True, env=GIT_ENV, timeout=60).stdout
        assume(text)
        work = folder / "work"
        work.mkdir()
        (work / "f").write_bytes(old)
        subprocess.run(["git", "apply", "-p1"], input=text, cwd=work, env=GIT_ENV, check=True, timeout=60)
        expected = (work / "f").read_bytes()
    assert expected == new
    plan, result = apply_to(old, text)
    assert plan.fits, plan
    assert result == expected


@_SETTINGS
@given(pairs(unique=True), st.lists(_LINES, max_size=6), st.integers(0, 40), st.integers(0, 4), st.integers(0, 3))
def test_a_changed_file_gives_what_patch_gives(
    pair: tuple[bytes, bytes], inserted: list[bytes], position: int, cut: int, fuzz: int
) -> None:
    """The file to patch is another than the one that was diffed: offsets, fuzz and refusals are those of GNU patch."""
    old, new = pair
    lines = old.split(b"\n")
    lines[position:position] = inserted
    lines[max(0, len(lines) - 1 - cut) : -1] = []
    target = b"\n".join(lines)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = diff(old, new, folder)
        assume(text)
        work = folder / "work"
        work.mkdir()
        (work / "f").write_bytes(target)
        command = ["patch", "-p1", "--batch", "--forward", "--binary", f"--fuzz={fuzz}"]
        done = subprocess.run(command, input=text, cwd=work, capture_output=True, timeout=60)
        expected = (work / "f").read_bytes() if (work / "f").exists() else None
        shutil.rmtree(work)
    assume(b"Reversed (or previously applied)" not in done.stdout)  # a guess that we do not make
    plan, result = apply_to(target, text, fuzz=fuzz, partial=True)
    if done.returncode == 0:
        assert plan.fits, (plan, done.stdout)
        assert result == expected
    else:
        assert not plan.fits, done.stdout
