"""Where one diff of a series ends and the next begins, with and without a word between them."""

from __future__ import annotations

import pytest

from services.exec_agent.files.patch import parse
from tests.support.patch_sections import copy, create, delete, link, modify, rename, text_file

_A, _B, _L = text_file("A"), text_file("B"), link("q")
_PLAIN = b"--- a/a\n+++ b/a\n@@ -1 +1 @@\n-A\n+B\n"


@pytest.mark.parametrize(
    ("sections", "commits"),
    [
        # What a single diff has, in git's order and in any other.
        ([rename("a", "b"), rename("b", "a")], [0, 0]),
        ([rename("a", "b"), rename("b", "c"), rename("c", "a")], [0, 0, 0]),
        ([rename("c", "a"), rename("b", "c"), rename("a", "b")], [0, 0, 0]),
        ([modify("a", _A, _B), copy("a", "b"), copy("a", "c")], [0, 0, 0]),
        ([copy("a", "b"), rename("a", "c")], [0, 0]),
        ([delete("a", _A), create("a", _L)], [0, 0]),
        ([rename("b", "a"), delete("b/x", _A)], [0, 0]),
        ([create("a", _A), rename("a", "b")], [0, 0]),
        # What none has.
        ([modify("a", _A, _B), modify("a", _B, _A)], [0, 1]),
        ([modify("a", _A, _B), rename("a", "b")], [0, 1]),
        ([modify("a", _A, _B), delete("a", _B)], [0, 1]),
        ([rename("a", "b"), modify("b", _A, _B)], [0, 1]),
        ([rename("a", "c"), rename("b", "c")], [0, 1]),
        ([copy("a", "b"), modify("b", _A, _B)], [0, 1]),
        ([create("a", _A), delete("a", _A)], [0, 1]),
        ([create("a", _A), delete("a", _A), create("a", _A)], [0, 1, 1]),
        ([create("a", _A), create("a", _A)], [0, 1]),
        ([_PLAIN, rename("a", "b")], [0, 1]),
        # The next one begins where the names do.
        ([modify("d/x", _A, _B), delete("e", _A), create("d", _A), delete("d/x", _B)], [0, 0, 1, 1]),
        ([modify("b", _A, _B), modify("a", _A, _B), modify("c", _A, _B), modify("c", _B, _A)], [0, 0, 0, 1]),
        ([modify("a", _A, _B)] * 4, [0, 1, 2, 3]),
        # Words begin one, too.
        ([rename("a", "b"), b"Subject: next\n\n", rename("b", "a"), rename("a", "b")], [0, 1, 1]),
        ([modify("a", _A, _B), b"Subject: next\n\n", modify("a", _B, _A), modify("a", _A, _B)], [0, 1, 2]),
    ],
)
def test_commits(sections: list[bytes], commits: list[int]) -> None:
    assert [patch.commit for patch in parse(b"".join(sections))] == commits
