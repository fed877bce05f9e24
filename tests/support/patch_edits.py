"""Random trees of files, edits of them, and what may have become of a tree by the time that a patch of it arrives."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_NAMES: Final = (
    *(b"a.txt", b"b.txt", b"main.py", b"src/main.py", b"src/deep/er/x.c", b"src/deep/y.c", b"docs/read me.md"),
    *(b"with blank", b"two  blanks.txt", b"-dash", b"@@ -1 +1 @@", b"b/b/b", b"a b/a b", b"dir/.hidden"),
    *("naïve.txt".encode(), "名前/読む.txt".encode(), b"octal\001name", b'quo"te', b"back\\slash", b"tab\there"),
    *(b"\xff\xfe.bin", b"line\nend", b"trail ", b" lead", b"bell\a/x", b"a.txt.orig", b"src/\xe9t\xe9/z"),
)
_WORDS: Final = (b"red", b"green", b"", b"blue", b"-minus", b"+plus", b"@@ -1,2 +1,2 @@", b"\\ back", b"--- a/x", b"\f")
_REPEATED: Final = (b"", b"}", b"    return", b"# ---")


@dataclass(frozen=True)
class File:
    """A file or, with `is_link`, a symbolic link and its target."""

    data: bytes
    executable: bool = False
    is_link: bool = False

    @property
    def is_text(self) -> bool:
        return not self.is_link and b"\0" not in self.data


Tree = dict[bytes, File]


class Maker:
    """Trees and edits from one source of randomness."""

    def __init__(self, rng: random.Random, *, links: bool, plain_names: bool) -> None:
        self._rng = rng
        self._links = links
        self._plain_names = plain_names
        self._serial = 0

    def tree(self) -> Tree:
        tree: Tree = {}
        for _ in range(self._rng.randint(1, 6)):
            self._add(tree)
        return tree

    def edited(self, tree: Tree) -> tuple[Tree, tuple[str, ...]]:
        new = dict(tree)
        done = []
        for _ in range(self._rng.randint(1, 4)):
            edit = self._rng.choice(self._edits())
            if edit(new):
                done.append(edit.__name__.removeprefix("_"))
        return new, tuple(done)

    def target(self, source: Tree, result: Tree) -> tuple[str, Tree]:
        """The source as it may be by the time that the patch arrives."""
        ways: dict[str, Callable[[bytes], bytes]] = {
            "shifted": self._shifted,
            "damaged": self._damaged,
            "rewritten": self._modified,
            "shifted and damaged": lambda data: self._damaged(self._shifted(data)),
            "other line ends": lambda data: data.replace(b"\n", b"\r\n").replace(b"\r\r", b"\r"),
        }
        situation = self._rng.choice(["exact", "exact", "applied", "missing", "in the way", *ways])
        target = dict(source)
        if situation == "applied":
            return situation, dict(result)
        if situation == "missing" and target:
            del target[self._rng.choice(sorted(target))]
        elif situation == "in the way":
            for name in sorted(result.keys() - source.keys()):
                if is_free(target, name):
                    target[name] = File(self._text(), executable=self._rng.random() < 0.2)
        elif situation in ways:
            for name in sorted(target):
                file = target[name]
                if file.is_text and (file != result.get(name)):
                    target[name] = File(ways[situation](file.data), file.executable)
        return situation, target

    def _edits(self) -> list[Callable[[Tree], bool]]:
        edits = [self._modify, self._modify, self._modify, self._create, self._delete, self._rename, self._copy]
        edits += [self._rename_and_modify, self._make_binary, self._touch_binary, self._turn_mode, self._empty]
        edits += [self._line_ends, self._final_newline, self._swap, self._to_directory]
        return [*edits, self._link, self._retarget] if self._links else edits

    def _name(self, tree: Tree) -> bytes | None:
        for _ in range(8):
            name = self._rng.choice(_NAMES)
            if self._rng.random() < 0.3:
                self._serial += 1
                name += b"%d" % self._serial
            if self._plain_names and name.startswith((b"-", b" ")):
                continue
            if is_free(tree, name):
                return name
        return None

    def _add(self, tree: Tree) -> bool:
        name = self._name(tree)
        if name is None:
            return False
        kind = self._rng.random()
        if kind < 0.1 and self._links:
            tree[name] = File(self._rng.choice([b"a.txt", b"../up", b"/no where", b"src"]), is_link=True)
        elif kind < 0.2:
            tree[name] = File(b"\0" + self._rng.randbytes(self._rng.choice([1, 40, 600, 3000])))
        elif kind < 0.28:
            tree[name] = File(b"")
        else:
            tree[name] = File(self._text(), executable=self._rng.random() < 0.2)
        return True

    def _line(self) -> bytes:
        self._serial += 1
        if self._rng.random() < 0.15:
            return self._rng.choice(_REPEATED)
        return b"%d %s" % (self._serial, self._rng.choice(_WORDS))

    def _text(self) -> bytes:
        lines = [self._line() for _ in range(self._rng.choice([1, 2, 5, 12, 30, 60]))]
        end = self._rng.choice([b"\n", b"\n", b"\n", b"\r\n"])
        return end.join(lines) + (b"" if self._rng.random() < 0.15 else end)

    def _modified(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        end = b"\r\n" if lines and lines[0].endswith(b"\r\n") else b"\n"
        for _ in range(self._rng.choice([1, 1, 2, 3])):
            position = self._rng.choice([0, len(lines), self._rng.randint(0, len(lines))])
            if position and not lines[position - 1].endswith(b"\n"):
                position -= 1
            fresh = [self._line() + end for _ in range(self._rng.choice([0, 1, 1, 3]))]
            lines[position : position + self._rng.choice([0, 1, 1, 2])] = fresh
        return b"".join(lines)

    def _shifted(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        if self._rng.random() < 0.5:
            return b"".join(self._line() + b"\n" for _ in range(self._rng.randint(1, 5))) + data
        position = self._rng.randint(0, len(lines))
        if self._rng.random() < 0.5:
            return b"".join(lines[self._rng.randint(0, min(3, len(lines))) :])
        return b"".join(lines[:position]) + self._line() + b"\n" + b"".join(lines[position:])

    def _damaged(self, data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        for _ in range(self._rng.choice([1, 1, 2])):
            if lines:
                position = self._rng.randrange(len(lines))
                lines[position] = b"damaged " + lines[position]
        return b"".join(lines)

    def _pick(self, tree: Tree, *, text: bool = False, link: bool = False, binary: bool = False) -> bytes | None:
        def fits(file: File) -> bool:
            if link:
                return file.is_link
            return not file.is_link and (not text or file.is_text) and (not binary or not file.is_text)

        names = sorted(name for name, file in tree.items() if fits(file))
        return self._rng.choice(names) if names else None

    def _modify(self, tree: Tree) -> bool:
        name = self._pick(tree, text=True)
        if name is not None:
            tree[name] = File(self._modified(tree[name].data), tree[name].executable)
        return name is not None

    def _create(self, tree: Tree) -> bool:
        return self._add(tree)

    def _delete(self, tree: Tree) -> bool:
        names = sorted(tree)
        if names:
            del tree[self._rng.choice(names)]
        return bool(names)

    def _rename(self, tree: Tree) -> bool:
        return self._again(tree, keep=False) is not None

    def _copy(self, tree: Tree) -> bool:
        return self._again(tree, keep=True) is not None

    def _again(self, tree: Tree, *, keep: bool) -> bytes | None:
        new = self._name(tree)
        if not tree or new is None:
            return None
        old = self._rng.choice(sorted(tree))
        tree[new] = tree[old]
        if not keep:
            del tree[old]
        return new

    def _rename_and_modify(self, tree: Tree) -> bool:
        name = self._again(tree, keep=self._rng.random() < 0.3)
        if name is not None and tree[name].is_text:
            tree[name] = File(self._modified(tree[name].data), self._rng.random() < 0.2)
        return name is not None

    def _make_binary(self, tree: Tree) -> bool:
        name = self._pick(tree)
        if name is not None:
            tree[name] = File(self._rng.randbytes(self._rng.choice([2, 100, 2000])) + b"\0", tree[name].executable)
        return name is not None

    def _touch_binary(self, tree: Tree) -> bool:
        name = self._pick(tree, binary=True)
        if name is not None:
            data = bytearray(tree[name].data)
            data[self._rng.randrange(len(data))] ^= 0x55
            tree[name] = File(bytes(data) + self._rng.choice([b"", b"\0tail"]), tree[name].executable)
        return name is not None

    def _turn_mode(self, tree: Tree) -> bool:
        name = self._pick(tree)
        if name is not None:
            tree[name] = File(tree[name].data, not tree[name].executable)
        return name is not None

    def _empty(self, tree: Tree) -> bool:
        name = self._pick(tree)
        if name is not None:
            tree[name] = File(self._text() if not tree[name].data else b"", tree[name].executable)
        return name is not None

    def _line_ends(self, tree: Tree) -> bool:
        name = self._pick(tree, text=True)
        if name is not None:
            data = tree[name].data
            turned = data.replace(b"\r\n", b"\n") if b"\r\n" in data else data.replace(b"\n", b"\r\n")
            tree[name] = File(turned, tree[name].executable)
        return name is not None

    def _final_newline(self, tree: Tree) -> bool:
        name = self._pick(tree, text=True)
        if name is not None:
            data = tree[name].data
            tree[name] = File(data[:-1] if data.endswith(b"\n") else data + b"\n", tree[name].executable)
        return name is not None

    def _swap(self, tree: Tree) -> bool:
        one, other = self._pick(tree), self._pick(tree)
        if one is not None and other is not None:
            tree[one], tree[other] = tree[other], tree[one]
        return one is not None

    def _to_directory(self, tree: Tree) -> bool:
        """A file becomes a directory with a file in it, or a directory a file."""
        below = sorted(name for name in tree if b"/" in name)
        if below and self._rng.random() < 0.5:
            top = self._rng.choice(below).split(b"/")[0]
            for name in [name for name in tree if name.startswith(top + b"/")]:
                del tree[name]
            tree[top] = File(self._text())
            return True
        name = self._pick(tree)
        if name is not None:
            tree[name + b"/inside"] = tree.pop(name)
        return name is not None

    def _link(self, tree: Tree) -> bool:
        name = self._pick(tree)
        if name is not None:
            tree[name] = File(b"a.txt", is_link=True)
        return name is not None

    def _retarget(self, tree: Tree) -> bool:
        name = self._pick(tree, link=True)
        if name is not None:
            tree[name] = self._rng.choice([File(b"elsewhere", is_link=True), File(self._text())])
        return name is not None


def is_free(tree: Mapping[bytes, File], name: bytes) -> bool:
    """Whether a file of this name can be made: nothing is there, above it or below it."""
    parts = name.split(b"/")
    above = {b"/".join(parts[:depth]) for depth in range(1, len(parts) + 1)}
    return not above & tree.keys() and not any(other.startswith(name + b"/") for other in tree)
