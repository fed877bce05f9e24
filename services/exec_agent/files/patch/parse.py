"""Reads unified and git diffs into FilePatches.

Text between file sections (mail headers, commit messages, `Index:` lines) is passed over, as patch and git apply do;
what looks like a part of a patch but stands where none can be is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Final

from services.exec_agent.files.patch import names
from services.exec_agent.files.patch.binary import read_binary
from services.exec_agent.files.patch.commits import number_commits
from services.exec_agent.files.patch.content import full_id
from services.exec_agent.files.patch.lines import Lines
from services.exec_agent.files.patch.model import (
    NO_BINARY_DATA,
    Action,
    BinaryChange,
    FilePatch,
    Hunk,
    PatchMalformedError,
)

_HUNK: Final = re.compile(rb"@@ -(\d{1,10})(?:,(\d{1,10}))? \+(\d{1,10})(?:,(\d{1,10}))? @@")
_INDEX: Final = re.compile(rb"index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: ([0-7]{6}))?\Z")
_BINARY: Final = re.compile(rb"Binary files (.+) and (.+) differ\Z")
_MODE: Final = re.compile(rb"(?:100|120|160)[0-7]{3}\Z")
_OLD_SIGNS: Final = frozenset({b" ", b"-"})
_NEW_SIGNS: Final = frozenset({b" ", b"+"})
_BARE_LINE_ENDS: Final = frozenset({b"\n", b"\r"})


def parse(text: bytes, strip: int | None = None) -> list[FilePatch]:
    """Parse a whole patch.

    Args:
        text: the patch.
        strip: leading path components to remove. None: 1, or none from a name that has only one.

    Raises:
        PatchMalformedError: the text is no patch or a broken one.
        PatchPathError: a path is absolute or has a "..".
    """
    lines = Lines(text)
    parser = _Parser(lines, strip)
    found: list[FilePatch] = []
    commit = 0
    while lines.head:
        head = lines.header
        if head.startswith(b"diff --git "):
            patch = parser.git_section()
        elif head.startswith(b"--- ") and lines.after_head.startswith(b"+++ "):
            patch = parser.plain_section()
        elif head.startswith(b"@@ -") and _HUNK.match(head):
            raise PatchMalformedError(
                lines.number, "a hunk without a file header; '--- ' and '+++ ' lines must stand before it"
            )
        elif head.startswith((b"diff --cc ", b"diff --combined ")):
            raise PatchMalformedError(lines.number, "a combined diff of a merge cannot be applied; diff two trees")
        elif match := _BINARY.match(head):
            patch = parser.plain_binary(match)
        else:
            if head and found and found[-1].commit == commit:
                commit += 1
            lines.advance()
            continue
        found.append(replace(patch, commit=commit))
    if not found:
        raise PatchMalformedError(
            1, "no patch in it; expected a unified or git diff, which has a 'diff --git' or '--- ' and '+++ ' lines"
        )
    return number_commits(found)


@dataclass(slots=True)
class _Section:
    """What the header lines of one git section said."""

    line: int
    default_name: bytes | None
    old_name: bytes | None = None
    new_name: bytes | None = None
    old_mode: int = 0
    new_mode: int = 0
    action: Action = Action.MODIFY
    ids: tuple[str, str] = ("", "")
    has_names: bool = False
    has_carriage_returns: bool = False
    problem: str = ""
    binary: tuple[BinaryChange, BinaryChange | None] | None = None
    hunks: list[Hunk] = field(default_factory=list)


class _Parser:
    def __init__(self, lines: Lines, strip: int | None) -> None:
        self._lines = lines
        self._strip = 1 if strip is None else strip
        self._may_guess = strip is None

    def git_section(self) -> FilePatch:
        lines = self._lines
        text = lines.header.removeprefix(b"diff --git ")
        try:
            default = names.git_header_name(text, self._strip)
            if default is None and self._may_guess:
                default = names.git_header_name(text, 0)
        except names.BadNameError as error:
            raise PatchMalformedError(lines.number, str(error)) from None
        section = _Section(lines.number, default, has_carriage_returns=lines.head.endswith(b"\r\n"))
        lines.advance()
        while lines.head and self._extended_header(section):
            pass
        section.hunks = self._hunks()
        return self._finish(section)

    def _extended_header(self, section: _Section) -> bool:
        """Take one header line of a git section; False where the header ends."""
        lines = self._lines
        head, number = lines.header, lines.number
        keyword, _, _ = head.partition(b" ")
        two_words = b" ".join(head.split(b" ", 2)[:2])
        value = head[len(two_words) + 1 :]
        if two_words == b"old mode":
            section.old_mode = self._mode(value)
        elif two_words == b"new mode":
            section.new_mode = self._mode(value)
        elif head.startswith(b"deleted file mode "):
            section.action, section.old_mode = Action.DELETE, self._mode(head[18:])
        elif head.startswith(b"new file mode "):
            section.action, section.new_mode = Action.CREATE, self._mode(head[14:])
        elif two_words in {b"rename from", b"rename old", b"copy from"}:
            section.action = Action.COPY if keyword == b"copy" else Action.RENAME
            section.old_name = self._bare_name(value)
        elif two_words in {b"rename to", b"rename new", b"copy to"}:
            section.new_name = self._bare_name(value)
        elif match := _INDEX.match(head):
            section.ids = (match[1].decode(), match[2].decode())
            if match[3] and not section.old_mode and not section.new_mode:
                section.old_mode = section.new_mode = self._mode(match[3])
        elif keyword == b"---" and lines.after_head.startswith(b"+++ "):
            self._names_of_git(section)
            return False
        elif head == b"GIT binary patch":
            lines.advance()
            section.binary = read_binary(lines)
            return False
        elif _BINARY.match(head):
            section.problem = NO_BINARY_DATA
        elif two_words not in {b"similarity index", b"dissimilarity index"}:
            return False
        if lines.number == number:
            lines.advance()
        return True

    def _names_of_git(self, section: _Section) -> None:
        """The `--- ` and `+++ ` lines of a git section."""
        section.has_names = True
        old = self._line_name()[0]
        new = self._line_name()[0]
        if old == names.DEV_NULL:
            section.action = Action.CREATE
        elif section.old_name is None:
            section.old_name = self._stripped(old, self._lines.number - 2)
        if new == names.DEV_NULL:
            section.action = Action.DELETE
        elif section.new_name is None:
            section.new_name = self._stripped(new, self._lines.number - 1)

    def _finish(self, section: _Section) -> FilePatch:
        old = section.old_name or section.default_name
        new = section.new_name or section.default_name
        if section.action is Action.CREATE:
            old = new
        elif section.action is Action.DELETE:
            new = old
        if old is None or new is None:
            raise PatchMalformedError(
                section.line, f"the git header names no file after {self._strip} leading components are stripped"
            )
        old, new = names.checked(old), names.checked(new)
        is_change = section.hunks or section.binary or section.problem or section.action is not Action.MODIFY
        if not is_change and section.old_mode == section.new_mode:
            raise PatchMalformedError(section.line, "the section changes nothing: it has no hunk and no mode change")
        alternate = b""
        if section.action is Action.MODIFY and old != new:
            # Two names but no rename: `git diff --no-index`. Read it as a plain diff.
            old, alternate = new, old
        forward, backward = section.binary or (None, None)
        old_id, new_id = map(full_id, section.ids)
        return FilePatch(
            line=section.line,
            action=section.action,
            old_path=b"" if section.action is Action.CREATE else old,
            path=new,
            alternate_path=alternate,
            is_git=True,
            old_mode=section.old_mode,
            new_mode=section.new_mode,
            has_carriage_returns=section.has_carriage_returns,
            hunks=tuple(section.hunks),
            old_id=old_id,
            new_id=new_id,
            forward=forward,
            backward=backward,
            problem=section.problem,
        )

    def plain_section(self) -> FilePatch:
        lines = self._lines
        start = lines.number
        has_returns = lines.head.endswith(b"\r\n")
        (old, old_time), (new, new_time) = self._line_name(), self._line_name()
        action = Action.MODIFY
        if old == names.DEV_NULL or names.is_epoch(old_time):
            action = Action.CREATE
        elif new == names.DEV_NULL or names.is_epoch(new_time):
            action = Action.DELETE
        alternate = b""
        if new == names.DEV_NULL:
            path = names.checked(self._stripped(old, start))
        elif old == names.DEV_NULL:
            path = names.checked(self._stripped(new, start + 1))
        else:
            alternate = names.checked(self._stripped(old, start))
            path = names.checked(self._stripped(new, start + 1))
            if path.startswith(alternate) or action is Action.DELETE:
                # "file" against "file.orig" or "file~": the shorter one is meant.
                path, alternate = alternate, path
        hunks = self._hunks()
        if not hunks:
            raise PatchMalformedError(lines.number, "expected a hunk, '@@ -line,count +line,count @@', after '+++ '")
        return FilePatch(
            line=start,
            action=action,
            old_path=b"" if action is Action.CREATE else path,
            path=path,
            alternate_path=alternate if alternate != path and action is Action.MODIFY else b"",
            has_carriage_returns=has_returns,
            hunks=tuple(hunks),
        )

    def plain_binary(self, match: re.Match[bytes]) -> FilePatch:
        """A line by which diff says that binary files differ."""
        number = self._lines.number
        self._lines.advance()
        old, new = match[1], match[2]
        path = names.checked(self._stripped(old if new == names.DEV_NULL else new, number))
        return FilePatch(line=number, action=Action.MODIFY, old_path=path, path=path, problem=NO_BINARY_DATA)

    def _line_name(self) -> tuple[bytes, bytes]:
        """The name and timestamp of a `--- ` or `+++ ` line."""
        try:
            found = names.split_name(self._lines.header[4:])
        except names.BadNameError as error:
            raise PatchMalformedError(self._lines.number, str(error)) from None
        self._lines.advance()
        return found

    def _bare_name(self, value: bytes) -> bytes:
        """A name of a rename or copy line, which has no a/ or b/ in front."""
        try:
            name = names.unquote(value)[0] if value.startswith(b'"') else value
        except names.BadNameError as error:
            raise PatchMalformedError(self._lines.number, str(error)) from None
        return self._stripped(name, self._lines.number, max(0, self._strip - 1))

    def _stripped(self, name: bytes, line: int, count: int | None = None) -> bytes:
        count = self._strip if count is None else count
        found = names.strip_components(name, count)
        if found is None and self._may_guess and b"/" not in name:
            found = name or None
        if found is None:
            raise PatchMalformedError(
                line, f"nothing is left of {name.decode('utf-8', 'replace')!r} after {count} leading components"
            )
        return found

    def _mode(self, text: bytes) -> int:
        if _MODE.match(text) is None:
            raise PatchMalformedError(
                self._lines.number, f"{text.decode('utf-8', 'replace')!r} is no file mode, such as 100644"
            )
        return int(text, 8)

    def _hunks(self) -> list[Hunk]:
        hunks = []
        while self._lines.head.startswith(b"@@ -"):
            hunks.append(read_hunk(self._lines))
        return hunks


def read_hunk(lines: Lines) -> Hunk:
    """Read one hunk, header included."""
    start = lines.number
    match = _HUNK.match(lines.head)
    if match is None:
        raise PatchMalformedError(start, "expected '@@ -line,count +line,count @@'")
    lines.advance()
    old_left, new_left = (1 if group is None else int(group) for group in (match[2], match[4]))
    body = _HunkBody()
    while old_left > 0 or new_left > 0:
        line = lines.head
        sign = line[:1]
        if sign == b"\\" and body.signs:
            body.end_without_newline(lines)
            continue
        if sign in _BARE_LINE_ENDS:
            # Some editors and mailers cut blanks at the ends of lines, the one of an empty context line too.
            sign, line = b" ", b" " + line
        is_old, is_new = sign in _OLD_SIGNS, sign in _NEW_SIGNS
        old_left -= is_old
        new_left -= is_new
        if not (is_old or is_new) or old_left < 0 or new_left < 0:
            what = "the patch ends" if not line else "another line comes"
            raise PatchMalformedError(
                lines.number, f"{what} before the hunk of line {start} has as many lines as its header says"
            )
        content = line[1:] if line.endswith(b"\n") else line[1:] + b"\n"
        body.add(sign, content, is_old, is_new)
        lines.advance()
    if lines.head.startswith(b"\\") and body.signs:
        body.end_without_newline(lines)
    _refuse_surplus(lines, start)
    return body.hunk(start, int(match[1]), int(match[3]))


def _refuse_surplus(lines: Lines, start: int) -> None:
    """A line that belongs to a hunk must not follow its end: left out silently it would be lost."""
    head = lines.head
    if head[:1] not in {b"+", b"-", b" "} or head.rstrip() == b"--":
        return
    if head.startswith(b"--- ") and lines.after_head.startswith(b"+++ "):
        return
    raise PatchMalformedError(lines.number, f"the hunk of line {start} has more lines than its header says")


class _HunkBody:
    """Collects the lines of a hunk."""

    def __init__(self) -> None:
        self.signs = bytearray()
        self._old: list[bytes] = []
        self._new: list[bytes] = []

    def add(self, sign: bytes, content: bytes, is_old: bool, is_new: bool) -> None:
        self.signs += sign
        if is_old:
            self._old.append(content)
        if is_new:
            self._new.append(content)

    def end_without_newline(self, lines: Lines) -> None:
        """The mark of a missing newline speaks of the line before it."""
        sign = bytes(self.signs[-1:])
        for side, signs in ((self._old, _OLD_SIGNS), (self._new, _NEW_SIGNS)):
            if sign in signs:
                side[-1] = side[-1].removesuffix(b"\n")
        lines.advance()

    def _check_ends(self, line: int) -> None:
        for side in (self._old, self._new):
            if not all(text.endswith(b"\n") for text in side[:-1]):
                raise PatchMalformedError(
                    line, "in this hunk lines follow one that has no newline, the end of its file"
                )

    def hunk(self, line: int, old_start: int, new_start: int) -> Hunk:
        self._check_ends(line)
        signs = bytes(self.signs)
        leading = len(signs) - len(signs.lstrip(b" "))
        trailing = len(signs) - len(signs.rstrip(b" "))
        return Hunk(line, old_start, new_start, tuple(self._old), tuple(self._new), leading, trailing)
