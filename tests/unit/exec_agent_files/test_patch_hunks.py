"""Where a hunk fits whose file ends elsewhere than the one that was diffed, and what it must not do to lines there."""

from __future__ import annotations

import pytest

from tests.unit.exec_agent_files.support import apply_to


@pytest.mark.parametrize(
    ("content", "text", "expected"),
    [
        (b"", b"@@ -1 +1,2 @@\n+new\n a\n", b"new\n"),
        (b"a\nb\nc\n", b"@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n", b"a\nb\nC\n"),
        (b"moved\na\nb\nc\n", b"@@ -2,3 +2,3 @@\n b\n-c\n+C\n d\n", b"moved\na\nb\nC\n"),
        (b"a\nb\nc", b"@@ -1,4 +1,3 @@\n a\n-b\n c\n d\n", b"a\nc"),
    ],
)
def test_context_that_is_ignored_may_lie_past_the_end_of_the_file(content: bytes, text: bytes, expected: bytes) -> None:
    text = b"--- a/f\n+++ b/f\n" + text
    plan, result = apply_to(content, text, fuzz=2)
    assert plan.fits, plan.results
    assert result == expected
    assert not apply_to(content, text, fuzz=0)[0].fits


@pytest.mark.parametrize(
    ("content", "text"),
    [
        # Context that fuzz ignores: the file's own line there is the last, and has no newline.
        (b"a\nx", b"@@ -1,2 +1,3 @@\n a\n b\n+c\n"),
        (b"x", b"@@ -1,2 +1,3 @@\n a\n+c\n b\n"),
        # An earlier hunk made it so.
        (
            b"a\nb\n",
            b"@@ -2 +2 @@\n-b\n+B\n\\ No newline at end of file\n@@ -2,0 +3 @@\n+c\n",
        ),
        (
            b"a\nb\n",
            b"@@ -2,0 +3 @@\n+c\n@@ -2 +2 @@\n-b\n+B\n\\ No newline at end of file\n",
        ),
    ],
)
def test_no_line_is_joined_with_the_next(content: bytes, text: bytes) -> None:
    plan, result = apply_to(content, b"--- a/f\n+++ b/f\n" + text, fuzz=2)
    assert not plan.fits
    assert result == content
