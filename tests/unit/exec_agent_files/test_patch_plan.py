"""Where hunks fit, what is reported of those that do not, and what is no patch at all."""

from __future__ import annotations

import stat

import pytest

from services.exec_agent.files.patch import (
    Action,
    Entry,
    Options,
    PatchMalformedError,
    PatchPathError,
    parse,
)
from tests.unit.exec_agent_files.support import apply, apply_to, entry

_NUMBERS = b"".join(b"%d\n" % number for number in range(1, 101))
_PATCH = b"""\
--- a/f
+++ b/f
@@ -10,7 +10,8 @@
 10
 11
 12
-13
+thirteen
+and more
 14
 15
 16
@@ -50,3 +51,3 @@ some function
 50
-51
+fifty-one
 52
"""
# The id of the empty file.
_FILLING = b"diff --git a/f b/f\nindex e69de29..587be6b 100644\n--- a/f\n+++ b/f\n@@ -0,0 +1 @@\n+x\n"


def test_exact_place() -> None:
    plan, result = apply_to(_NUMBERS, _PATCH)
    assert plan.fits
    assert result == _NUMBERS.replace(b"\n13\n", b"\nthirteen\nand more\n").replace(b"\n51\n", b"\nfifty-one\n")
    assert [(h.number, h.expected_line, h.applied_line, h.fuzz) for h in plan.results[0].hunks] == [
        (1, 10, 10, 0),
        (2, 50, 50, 0),
    ]


def test_offsets_are_found_and_reported() -> None:
    moved = b"new\n" * 5 + _NUMBERS
    plan, result = apply_to(moved, _PATCH)
    assert plan.fits
    assert b"thirteen\nand more\n14\n" in result
    assert [h.applied_line for h in plan.results[0].hunks] == [15, 55]


def test_of_two_places_the_nearer_is_taken() -> None:
    block = b"a\nb\nc\n"
    text = b"--- a/f\n+++ b/f\n@@ -9,3 +9,3 @@\n a\n-b\n+B\n c\n"
    _plan, result = apply_to(block + b"-\n" * 3 + block + b"-\n" * 20 + block, text)
    assert result == block + b"-\n" * 3 + b"a\nB\nc\n" + b"-\n" * 20 + block


def test_a_hunk_that_does_not_fit_says_why_and_nothing_changes() -> None:
    changed = _NUMBERS.replace(b"\n51\n", b"\n51 changed\n")
    plan, result = apply_to(changed, _PATCH)
    assert not plan.fits
    assert result == changed
    first, second = plan.results[0].hunks
    assert (first.error, first.applied_line) == ("", 10)
    assert (second.number, second.expected_line, second.applied_line) == (2, 50, 0)
    assert second.error == "line 51: expected '51', found '51 changed'"


def test_partial_takes_what_fits() -> None:
    changed = _NUMBERS.replace(b"\n51\n", b"\n51 changed\n")
    plan, result = apply_to(changed, _PATCH, partial=True)
    assert not plan.fits
    assert result == changed.replace(b"\n13\n", b"\nthirteen\nand more\n")


def test_end_of_file_is_named() -> None:
    plan, _ = apply_to(b"1\n2\n", _PATCH)
    assert plan.results[0].hunks[0].error == "line 3: expected '10', found the end of the file"


def test_a_missing_newline_is_named() -> None:
    plan, _ = apply_to(b"a", b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n")
    assert plan.results[0].hunks[0].error == (
        "line 1: expected 'a', found 'a' without a newline at the end of the file"
    )


@pytest.mark.parametrize("fuzz", [0, 1, 2, 3])
def test_fuzz_ignores_that_many_context_lines(fuzz: int) -> None:
    changed = _NUMBERS.replace(b"\n11\n", b"\neleven\n")  # the middle one of three context lines
    plan, result = apply_to(changed, _PATCH, fuzz=fuzz)
    assert plan.fits is (fuzz >= 2)
    if fuzz >= 2:
        assert plan.results[0].hunks[0].fuzz == 2
        assert b"eleven\n12\nthirteen\n" in result


@pytest.mark.parametrize(
    ("content", "text"),
    [
        # No context after the change: the end of the file, or nowhere.
        (b"a\nb\nc\nd\n", b"@@ -1,2 +1,3 @@\n a\n b\n+x\n"),
        # No context before it, at line 1: the start of the file, or nowhere.
        (b"z\na\nb\n", b"@@ -1,2 +1,3 @@\n+x\n a\n b\n"),
        # No newline at the end: only at the end.
        (b"a\nb\n", b"@@ -1 +1 @@\n-a\n+x\n\\ No newline at end of file\n"),
    ],
)
def test_anchored_hunks(content: bytes, text: bytes) -> None:
    plan, _ = apply_to(content, b"--- a/f\n+++ b/f\n" + text)
    assert not plan.fits
    assert plan.results[0].hunks[0].error


def test_hunks_out_of_order_fit_but_not_over_each_other() -> None:
    header = b"--- a/f\n+++ b/f\n"
    late = b"@@ -50,3 +50,3 @@\n 50\n-51\n+x\n 52\n"
    early = b"@@ -10,3 +10,3 @@\n 10\n-11\n+y\n 12\n"
    plan, result = apply_to(_NUMBERS, header + late + early)
    assert plan.fits
    assert result == _NUMBERS.replace(b"\n51\n", b"\nx\n").replace(b"\n11\n", b"\ny\n")
    plan, _ = apply_to(_NUMBERS, header + late + late.replace(b"+x", b"+z"))
    assert "no other hunk" in plan.results[0].hunks[1].error


def test_many_equal_lines_do_not_take_for_ever() -> None:
    hunk = b"@@ -1,2 +1,2 @@\n a\n-a\n+b\n c\n".replace(b"1,2", b"1,3")
    plan, _ = apply_to(b"a\n" * 100_000 + b"c\n" * 100_000, b"--- a/f\n+++ b/f\n" + hunk * 300)
    assert not plan.fits


def _replaced(old: list[bytes], new: list[bytes], start: int) -> bytes:
    head = b"--- a/f\n+++ b/f\n@@ -%d,%d +%d,%d @@\n" % (start, len(old), start, len(new))
    return head + b"".join(b"-" + line for line in old) + b"".join(b"+" + line for line in new)


def test_long_hunks_of_equal_lines_do_not_take_for_ever() -> None:
    """A comparison counts by the lines that it may have to look at."""
    old = [b"x\n", b"y\n"] * 2000 + [b"y\n"]
    plan, _ = apply_to(b"x\ny\n" * 20_000, _replaced(old, [b"z\n"], 1))
    assert "too many places to compare" in plan.results[0].hunks[0].error


def test_a_long_hunk_is_found_where_it_moved_to() -> None:
    old = [b"%d\n" % (number % 1000) for number in range(6000)]  # no line is the only one of its kind
    before, after = b"before\n" * 3000, b"".join(old[:500]) + b"after\n"
    plan, result = apply_to(before + b"".join(old) + after, _replaced(old, [b"new\n"], 1))
    assert plan.fits, plan.results
    assert plan.results[0].hunks[0].applied_line == 3001
    assert result == before + b"new\n" + after


def test_a_patch_of_ten_megabytes_is_found_where_it_moved_to() -> None:
    lines = [b"line %06d of the old file\n" % number for number in range(200_000)]
    new = [b"line %06d of the new file\n" % number for number in range(200_000)]
    text = _replaced(lines, new, 1)
    assert len(text) > 10 << 20
    plan, result = apply_to(b"moved\n" * 10 + b"".join(lines), text)
    assert plan.fits, plan.results
    assert result == b"moved\n" * 10 + b"".join(new)


def test_many_long_hunks_in_one_file() -> None:
    """Each is looked for from where the one before it was found: that costs no search."""
    blocks = [[b"%d of block %d\n" % (line, block) for line in range(2000)] for block in range(40)]
    header, *hunks = (_replaced(old, [b"new\n"] * 2000, 1 + 2000 * n) for n, old in enumerate(blocks))
    text = header + b"".join(hunk.split(b"\n", 2)[2] for hunk in hunks)
    plan, result = apply_to(b"moved\n" + b"".join(b"".join(old) for old in blocks), text)
    assert plan.fits
    assert result == b"moved\n" + b"new\n" * 80_000


def test_all_context_may_be_ignored_at_the_end_of_a_shorter_file() -> None:
    text = b"--- a/f\n+++ b/f\n@@ -10,3 +10,4 @@\n 10\n 11\n 12\n+new\n"
    plan, result = apply_to(b"a\nb\nc\nd\n", text, fuzz=3)
    assert plan.fits, plan.results
    assert result == b"a\nb\nc\nd\nnew\n"
    assert not apply_to(b"a\nb\nc\nd\n", text, fuzz=2)[0].fits


def test_crlf_is_kept() -> None:
    text = b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\r\n-b\r\n+c\r\n"
    assert apply_to(b"a\r\nb\r\n", text)[1] == b"a\r\nc\r\n"
    assert not apply_to(b"a\nb\n", text)[0].fits


def test_a_patch_that_was_turned_to_crlf_as_a_whole_fits_both() -> None:
    text = b"--- a/f\r\n+++ b/f\r\n@@ -1,2 +1,2 @@\r\n a\r\n-b\r\n+c\r\n"
    assert apply_to(b"a\nb\n", text)[1] == b"a\nc\n"
    assert apply_to(b"a\r\nb\r\n", text)[1] == b"a\r\nc\r\n"


def test_lines_whose_blank_was_cut_and_a_last_line_without_newline() -> None:
    assert apply_to(b"a\n\nb\n", b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n\n-b\n+c")[1] == b"a\n\nc\n"


@pytest.mark.parametrize(
    ("name", "strip", "expected"),
    [
        (b"a/src/x.c", None, b"src/x.c"),
        (b"a/src/x.c", 0, b"a/src/x.c"),
        (b"a/src/x.c", 2, b"x.c"),
        (b"x.c", None, b"x.c"),
        (b"/tmp/a/x.c", 2, b"a/x.c"),
        (b"a//src///x.c", 1, b"src/x.c"),
        (b"./x.c", 1, b"x.c"),
        (b'"a/tab\\there \\"q\\" \\303\\251"', 1, b'tab\there "q" \xc3\xa9'),
        (b"a/with blank\t2024-05-06 07:08:09.123456789 +0200", 1, b"with blank"),
        (b"a/x.c 2024-05-06 07:08:09", 1, b"x.c"),
        (b"a/x.c Mon May  6 07:08:09 2024", 1, b"x.c"),
        (b"a/x.c\t(revision 17)", 1, b"x.c"),
    ],
)
def test_names(name: bytes, strip: int | None, expected: bytes) -> None:
    (patch,) = parse(b"--- " + name + b"\n+++ " + name + b"\n@@ -1 +1 @@\n-a\n+b\n", strip)
    assert patch.path == expected


def test_plain_diffs_that_make_and_remove_files() -> None:
    epoch = b"\t1970-01-01 01:00:00.000000000 +0100\n"
    now = b"\t2024-05-06 07:08:09.0 +0000\n"
    made = b"--- a/f" + epoch + b"+++ b/f" + now + b"@@ -0,0 +1 @@\n+x\n"
    removed = b"--- a/f" + now + b"+++ b/f" + epoch + b"@@ -1 +0,0 @@\n-x\n"
    assert parse(made)[0].action is Action.CREATE
    assert parse(removed)[0].action is Action.DELETE
    assert apply({}, made)[1] == {b"f": Entry(b"x\n", stat.S_IFREG | 0o644)}
    assert apply({b"f": entry(b"x\n")}, removed)[1] == {}
    plan, after = apply({b"f": entry(b"x\ny\n")}, removed)
    assert after == {b"f": entry(b"x\ny\n")}
    assert "lines would be left" in plan.results[0].error or plan.results[0].hunks[0].error


def test_the_name_that_exists_is_patched() -> None:
    text = b"--- a/f.orig\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n"
    assert apply({b"f": entry(b"a\n")}, text)[1][b"f"].data == b"b\n"
    text = b"--- a/f\n+++ b/g\n@@ -1 +1 @@\n-a\n+b\n"
    assert apply({b"f": entry(b"a\n")}, text)[1][b"f"].data == b"b\n"


@pytest.mark.parametrize(
    ("files", "text", "error"),
    [
        ({}, b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n", "'f' does not exist"),
        (
            {b"f": entry(b"old\n")},
            b"diff --git a/f b/f\nnew file mode 100644\n--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+x\n",
            "it exists already",
        ),
        (
            {b"f": Entry(b"t", stat.S_IFLNK | 0o777)},
            b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n",
            "it is a symbolic link; the patch is for a regular file",
        ),
        ({}, b"Binary files a/f and b/f differ\n", "the patch says only that this binary file differs"),
        ({b"f": entry(b"x\n")}, _FILLING, "it is not empty; the patch adds lines to an empty file"),
        ({b"f": entry(b"y\n")}, _FILLING, "it is not empty; the patch adds lines to an empty file"),
    ],
)
def test_files_that_cannot_be_patched(files: dict[bytes, Entry], text: bytes, error: str) -> None:
    plan, after = apply(files, text)
    assert not plan.fits
    assert plan.results[0].error.startswith(error)
    assert after == files


def test_lines_are_added_to_the_empty_file_that_the_diff_names() -> None:
    assert apply_to(b"", _FILLING)[1] == b"x\n"
    emptying = _FILLING.replace(b"e69de29..587be6b", b"587be6b..e69de29")
    emptying = emptying.replace(b"@@ -0,0 +1 @@\n+x\n", b"@@ -1 +0,0 @@\n-x\n")
    assert apply_to(b"", emptying, reverse=True)[1] == b"x\n"
    assert not apply_to(b"x\n", emptying, reverse=True)[0].fits
    assert apply_to(b"x\n", emptying)[1] == b""


def test_an_id_of_the_empty_file_counts_for_nothing_where_old_lines_say_otherwise() -> None:
    text = _FILLING.replace(b"@@ -0,0 +1 @@\n", b"@@ -1 +1 @@\n-a\n")
    assert apply_to(b"a\n", text)[1] == b"x\n"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (b"", 1, "no patch in it"),
        (b"hello\nworld\n", 1, "no patch in it"),
        (b"*** a/f\n--- b/f\n***************\n", 1, "no patch in it"),
        (b"intro\n@@ -1 +1 @@\n-a\n+b\n", 2, "a hunk without a file header"),
        (b"--- a/f\n+++ b/f\n", 3, "expected a hunk"),
        (b"--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n-b\n", 6, "the patch ends before the hunk of line 3"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1,2 @@\n a\n-b\n-c\n+d\n", 6, "another line comes before the hunk of line 3"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n+c\n", 6, "the hunk of line 3 has more lines"),
        (b"--- a/f\n+++ b/f\n@@ -1,2 +1 @@\n-a\nxyz\n", 5, "another line comes before"),
        (b"--- a/f\n+++ b/f\n@@ -x +1 @@\n", 3, "expected '@@"),
        (b"diff --git a/f b/f\nindex 1234567..1234568 100644\n", 1, "changes nothing"),
        (b"diff --git a/f b/g\nold mode 100644\nnew mode 100755\n", 1, "names no file"),
        (b"diff --git a/f b/f\nnew file mode rw\n", 2, "no file mode"),
        (b"diff --cc f\nindex 1,2..3\n", 1, "combined diff"),
        (b'--- "a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n', 1, "quoted name does not end"),
        (b'--- "a/\\q"\n+++ b/f\n@@ -1 +1 @@\n-a\n+b\n', 1, "unknown escape"),
        (b"diff --git a/f b/f\nGIT binary patch\nliteral 4\nXabc\n\n", 4, "broken binary data"),
        (b"diff --git a/f b/f\nGIT binary patch\nliteral 4\n\n", 3, "does not have the 4 bytes"),
        (b"diff --git a/f b/f\nGIT binary patch\nliteral 999999999999\n", 3, "at most 64 MiB"),
        (b"diff --git a/f b/f\nGIT binary patch\nnothing\n", 3, "expected 'literal SIZE'"),
        (b"--- a/f\n+++ b/f\n@@ -1 +1,2 @@\n-a\n+b\n\\ No newline at end of file\n+c\n", 3, "no newline"),
    ],
)
def test_malformed(text: bytes, line: int, message: str) -> None:
    with pytest.raises(PatchMalformedError) as caught:
        parse(text)
    assert message in caught.value.message
    assert caught.value.line == line


def test_too_few_components_for_an_explicit_strip() -> None:
    with pytest.raises(PatchMalformedError, match="nothing is left"):
        parse(b"--- x\n+++ x\n@@ -1 +1 @@\n-a\n+b\n", 1)


@pytest.mark.parametrize("name", [b"a/../../etc/passwd", b"a/x/../../y", b"a/..", b"a/.", b'"a/\\056\\056/x"'])
@pytest.mark.parametrize(
    "template",
    [
        b"--- %s\n+++ %s\n@@ -1 +1 @@\n-a\n+b\n",
        b"--- /dev/null\n+++ %s\n@@ -0,0 +1 @@\n+b\n",
        b"--- %s\n+++ /dev/null\n@@ -1 +0,0 @@\n-b\n",
        b"diff --git a/f b/f\nrename from f\nrename to %s\n",
        b"diff --git a/f b/f\ncopy from %s\ncopy to f\n",
    ],
)
def test_paths_that_leave(name: bytes, template: bytes) -> None:
    count = template.count(b"%s")
    if b"rename" in template or b"copy" in template:
        name = name.replace(b"a/", b"", 1)
    with pytest.raises(PatchPathError):
        parse(template % ((name,) * count))


def test_absolute_paths_leave() -> None:
    with pytest.raises(PatchPathError):
        parse(b"--- /etc/passwd\n+++ /etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", 0)


def test_a_link_made_by_the_patch_is_not_followed() -> None:
    text = (
        b"diff --git a/l b/l\nnew file mode 120000\n--- /dev/null\n+++ b/l\n@@ -0,0 +1 @@\n+/etc\n"
        b"\\ No newline at end of file\n"
        b"diff --git a/l/x b/l/x\nnew file mode 100644\n--- /dev/null\n+++ b/l/x\n@@ -0,0 +1 @@\n+x\n"
    )
    with pytest.raises(PatchPathError, match="through a link"):
        apply({}, text)


def test_later_patches_see_what_earlier_ones_made() -> None:
    text = (
        b"--- /dev/null\n+++ b/g\n@@ -0,0 +1 @@\n+one\n"
        b"--- a/g\n+++ b/g\n@@ -1 +1 @@\n-one\n+two\n"
        b"diff --git a/g b/h\nsimilarity index 100%\nrename from g\nrename to h\n"
    )
    plan, after = apply({}, text)
    assert plan.fits, plan
    assert after == {b"h": Entry(b"two\n", stat.S_IFREG | 0o644)}
    assert len(plan.changes) == 1


def test_reverse_partial_and_fuzz_together() -> None:
    plan, result = apply_to(_NUMBERS, _PATCH)
    back, undone = apply({b"f": entry(result)}, _PATCH, options=Options(reverse=True, fuzz=2, partial=True))
    assert plan.fits
    assert back.fits
    assert undone[b"f"].data == _NUMBERS
