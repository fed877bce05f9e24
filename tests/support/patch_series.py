"""Random series of diffs, each of one step of a tree's history, in one patch; most without a word between them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.patch_cases import Case, Flavour, import_trees, run_tool
from tests.support.patch_edits import File, Maker, Tree, is_free

_STEPS: Final = 2
_FLAVOURS: Final = (("-M",), ("-M",), ("-M", "--binary"), ("--binary", "--no-renames"), ("-M", "-B", "--binary"))


class _History(NamedTuple):
    number: int
    rng: random.Random
    trees: tuple[Tree, ...]
    edits: tuple[str, ...]


def series(seed: int, folder: Path, count: int, start: int = 0) -> Iterator[Case]:
    """Cases whose `parts` are the diffs; `folder` is for git and may be removed afterwards."""
    histories = [_history(seed, number) for number in range(start, start + count)]
    branches = {f"{h.number}/{step}": tree for h in histories for step, tree in enumerate(h.trees)}
    import_trees(folder, branches)
    for history in histories:
        flavour = history.rng.choice(_FLAVOURS)
        parts = []
        for old, new in pairwise(range(_STEPS + 1)):
            command = ["git", "diff", *flavour, f"{history.number}/{old}", f"{history.number}/{new}"]
            parts.append(run_tool(*command, cwd=folder / "repository"))
        if all(parts):
            yield _case(history, flavour, parts)


def _history(seed: int, number: int) -> _History:
    rng = random.Random(f"series/{seed}/{number}")
    maker = Maker(rng, links=True, plain_names=False)
    trees, edits = [maker.tree()], []
    for _ in range(_STEPS):
        tree, done = maker.edited(trees[-1])
        trees.append(tree)
        edits += [*done, "then"]
    return _History(number, rng, tuple(trees), tuple(edits))


def _case(history: _History, flavour: tuple[str, ...], parts: list[bytes]) -> Case:
    rng = history.rng
    word = rng.choice([b"", b"", b"From: somebody\nSubject: next\n\n"])
    reverse = rng.random() < 0.25
    source, result = history.trees[:: -1 if reverse else 1][::_STEPS]
    situation = rng.choice(["exact", "exact", "exact", "applied", "missing", "in the way"])
    target = dict(source)
    if situation == "applied":
        target = dict(result)
    elif situation == "missing" and target:
        del target[rng.choice(sorted(target))]
    elif situation == "in the way":
        names = sorted({name for tree in history.trees for name in tree} - source.keys())
        for name in names:
            if is_free(target, name):
                target[name] = File(b"somebody's own\n")
    old, new = history.trees[0], history.trees[-1]
    text = word.join(parts)
    made = Flavour("git", ("diff", *flavour), 1)
    return Case(history.number, old, new, target, text, made, situation, reverse, 0, history.edits, tuple(parts))
