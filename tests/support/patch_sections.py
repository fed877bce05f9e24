"""The sections of git diffs, written by hand: each changes one file of one line, or one symbolic link."""

from __future__ import annotations

from tests.support.patch_edits import File

_NO_NEWLINE = b"\\ No newline at end of file\n"


def text_file(line: str) -> File:
    return File(line.encode() + b"\n")


def link(target: str) -> File:
    return File(target.encode(), is_link=True)


def create(path: str, file: File) -> bytes:
    head = _head(path, path) + b"new file mode %s\n--- /dev/null\n+++ b/%s\n" % (_mode(file), path.encode())
    return head + b"@@ -0,0 +1 @@\n" + _lines(b"+", file)


def delete(path: str, file: File) -> bytes:
    head = _head(path, path) + b"deleted file mode %s\n--- a/%s\n+++ /dev/null\n" % (_mode(file), path.encode())
    return head + b"@@ -1 +0,0 @@\n" + _lines(b"-", file)


def modify(path: str, old: File, new: File) -> bytes:
    name = path.encode()
    head = _head(path, path) + b"index 1111111..2222222 %s\n--- a/%s\n+++ b/%s\n" % (_mode(old), name, name)
    return head + b"@@ -1 +1 @@\n" + _lines(b"-", old) + _lines(b"+", new)


def rename(old: str, new: str) -> bytes:
    return _moved("rename", old, new)


def copy(old: str, new: str) -> bytes:
    return _moved("copy", old, new)


def _moved(word: str, old: str, new: str) -> bytes:
    text = f"similarity index 100%\n{word} from {old}\n{word} to {new}\n"
    return _head(old, new) + text.encode()


def _head(old: str, new: str) -> bytes:
    return f"diff --git a/{old} b/{new}\n".encode()


def _mode(file: File) -> bytes:
    return b"120000" if file.is_link else b"100644"


def _lines(sign: bytes, file: File) -> bytes:
    return sign + (file.data + b"\n" + _NO_NEWLINE if file.is_link else file.data)
