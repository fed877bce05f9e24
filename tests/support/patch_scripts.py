"""Random patches that no tool has written: sections for a few names that are in each other's way in every manner.

The names are of files, directories and links at once: what one section makes, another takes, or needs as a directory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tests.support import patch_sections as sections
from tests.support.patch_cases import Case, Flavour
from tests.support.patch_edits import File, Tree, is_free

_NAMES: Final = ("a", "b", "c", "d", "a/x", "b/x", "d/x", "d/y", "d/e/z", "L", "L/x", "q", "q/x", "q/y")
_FLAVOUR: Final = Flavour("git", ("written by hand",), 1)
_TEXT: Final = b"From: somebody\n\n"  # begins another commit


class Scripts:
    """Makes cases of such patches from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def any(self, count: int, start: int = 0) -> Iterator[Case]:
        """Whatever comes: most fits nowhere, or only in part."""
        for number in range(start, start + count):
            rng = random.Random(f"any/{self._seed}/{number}")
            script = _Script(rng)
            target = script.tree()
            believed = dict(target)
            pieces: list[bytes] = []
            while len(pieces) < rng.randint(1, 7):
                if section := script.section(believed):
                    pieces += [_TEXT] * (rng.random() < 0.2) + [section]
            reverse = rng.random() < 0.25 and _is_tree(believed)
            if reverse:
                target, believed = believed, target
            yield _case(number, (target, believed), pieces, "any", reverse=reverse)

    def at_once(self, count: int, start: int = 0) -> Iterator[Case]:
        """As of one diff: every path is taken by one section and given by one, in any order; `new` must come out."""
        for number in range(start, start + count):
            rng = random.Random(f"at once/{self._seed}/{number}")
            script = _Script(rng)
            target = script.tree()
            new, pieces = script.shuffled(target)
            if pieces:
                yield _case(number, (target, new), pieces, "at once", reverse=False)


def _case(number: int, trees: tuple[Tree, Tree], pieces: list[bytes], situation: str, *, reverse: bool) -> Case:
    """`trees`: the one that is patched, and the one that the patch is believed to make of it."""
    target, result = trees
    old, new = (result, target) if reverse else (target, result)
    return Case(number, old, new, target, b"".join(pieces), _FLAVOUR, situation, reverse, 0)


def _is_tree(tree: Tree) -> bool:
    return all(is_free({other: tree[other] for other in tree if other != name}, name) for name in tree)


@dataclass
class _Script:
    rng: random.Random
    serial: int = 0

    def tree(self) -> Tree:
        tree: Tree = {}
        for name in self.rng.sample(_NAMES, 7):
            if is_free(tree, name.encode()):
                tree[name.encode()] = self._file(name)
        return tree

    def _file(self, name: str) -> File:
        self.serial += 1
        if name == "L" and self.rng.random() < 0.8:
            return sections.link(self.rng.choice(["q", "q", "d", "missing"]))
        return sections.text_file(f"{name} {self.serial}")

    def section(self, believed: Tree) -> bytes:
        """One that may fit what the ones before it have made; `believed` becomes what it makes of that."""
        kind = self.rng.choice(["create", "create", "delete", "delete", "modify", "rename", "rename", "copy"])
        path, other = self.rng.sample(_NAMES, 2)
        file = _seen(believed, path.encode())
        if kind == "create":
            made = believed[path.encode()] = self._file(path)
            return sections.create(path, made)
        if file is None:
            return b""
        if kind == "delete":
            believed.pop(path.encode(), None)
            return sections.delete(path, file)
        if kind == "modify":
            new = sections.link("elsewhere") if file.is_link else self._file("")
            believed[path.encode()] = new
            return sections.modify(path, file, new)
        if kind == "rename":
            believed.pop(path.encode(), None)
        believed[other.encode()] = file
        return (sections.rename if kind == "rename" else sections.copy)(path, other)

    def shuffled(self, old: Tree) -> tuple[Tree, list[bytes]]:
        """A random new tree and the sections that lead to it, in random order."""
        pieces = [_Piece(b"", name.encode(), file, sections.create(name, file)) for name, file in self._fresh()]
        for name in sorted(old):
            path, file, other = name.decode(), old[name], self.rng.choice(_NAMES)
            kind = self.rng.choice(["keep", "delete", "rename", "rename", "rename", "modify", "copy"])
            if kind == "delete":
                pieces.append(_Piece(name, b"", None, sections.delete(path, file)))
            elif kind == "modify" and not file.is_link:
                new = self._file("new")
                pieces.append(_Piece(name, name, new, sections.modify(path, file, new)))
            elif kind == "rename" and other != path:
                pieces.append(_Piece(name, other.encode(), file, sections.rename(path, other)))
            elif kind == "copy" and other != path:
                pieces.append(_Piece(b"", other.encode(), file, sections.copy(path, other)))
        self.rng.shuffle(pieces)
        while misfit := next((piece for piece in pieces if _is_misfit(piece, pieces, old)), None):
            pieces.remove(misfit)
        # Of a removal and a new file in its place git writes the removal first.
        removed = {piece.takes for piece in pieces if not piece.gives}
        ordered = sorted(pieces, key=lambda piece: piece.gives in removed and b"\nnew file mode " in piece.text)
        return _made_of(old, pieces), [piece.text for piece in ordered]

    def _fresh(self) -> list[tuple[str, File]]:
        return [(name, self._file(name)) for name in self.rng.sample(_NAMES, 3)]


class _Piece(NamedTuple):
    """A section, the path that it takes away or changes, and the one that it gives a content to."""

    takes: bytes
    gives: bytes
    file: File | None
    text: bytes


def _made_of(old: Tree, pieces: list[_Piece]) -> Tree:
    taken = {piece.takes for piece in pieces}
    new = {name: file for name, file in old.items() if name not in taken}
    return new | {piece.gives: piece.file for piece in pieces if piece.file is not None}


def _is_misfit(piece: _Piece, pieces: list[_Piece], old: Tree) -> bool:
    """No diff can have it besides the others: what it gives is there, or given already, or in other files' way."""
    if not piece.gives:
        return False
    others = [other for other in pieces if other is not piece]
    if any(other.gives == piece.gives for other in others):
        return True
    is_there = piece.gives in old and piece.gives != piece.takes
    if is_there and not any(other.takes == piece.gives for other in others):
        return True
    new = _made_of(old, pieces)
    del new[piece.gives]
    return not is_free(new, piece.gives)


def _seen(tree: Tree, name: bytes) -> File | None:
    """What is at a path, by way of the link L too."""
    top, _, rest = name.partition(b"/")
    above = tree.get(top)
    if rest and above is not None and above.is_link:
        return tree.get(above.data + b"/" + rest)
    return tree.get(name)
