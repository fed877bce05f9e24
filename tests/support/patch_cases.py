"""Random trees, edits of them, diffs of the edits by the real tools, and targets that are no longer as diffed.

A seed gives the same cases on every machine that has the same git and diff.
"""

# ruff: noqa: PTH101, PTH103, PTH112, PTH114, PTH115, PTH118, PTH120, PTH123, PTH211 (names are bytes)
from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.patch_edits import File, Maker, Tree

ENVIRONMENT: Final = {
    "PATH": os.environ["PATH"],
    "HOME": "/nonexistent",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CEILING_DIRECTORIES": "/",
    "LC_ALL": "C",
    "TZ": "UTC",
}
Contents = dict[bytes, tuple[int, bytes]]


class Flavour(NamedTuple):
    """How a diff is made: the tool's arguments, and the components that stand before each name."""

    tool: str
    arguments: tuple[str, ...]
    strip: int

    @property
    def has_context(self) -> bool:
        return "-U0" not in self.arguments


@dataclass(frozen=True)
class Case:
    """A patch and the tree that it shall be applied to.

    Attributes:
        new: what the patch makes of `old`, and with `reverse` the other way round.
        target: the tree that is patched: the source, changed by `situation`.
        parts: the diffs that the patch is made of, where it is a series of them.
    """

    number: int
    old: Tree
    new: Tree
    target: Tree
    text: bytes
    flavour: Flavour
    situation: str
    reverse: bool
    fuzz: int
    edits: tuple[str, ...] = field(default=())
    parts: tuple[bytes, ...] = field(default=())

    @property
    def source(self) -> Tree:
        return self.new if self.reverse else self.old

    @property
    def result(self) -> Tree:
        return self.old if self.reverse else self.new

    def __str__(self) -> str:
        direction = " reversed" if self.reverse else ""
        tool = " ".join((self.flavour.tool, *self.flavour.arguments))
        return f"case {self.number}: {tool}, -p{self.flavour.strip}{direction}, {self.situation}, {self.edits}"


def write_tree(folder: Path, tree: Mapping[bytes, File]) -> None:
    """Make the files below a folder that is made too."""
    base = os.fsencode(folder)
    os.makedirs(base)
    for name, file in tree.items():
        path = os.path.join(base, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if file.is_link:
            os.symlink(file.data, path)
        else:
            with open(path, "wb") as stream:
                stream.write(file.data)
            os.chmod(path, 0o755 if file.executable else 0o644)


def read_tree(folder: Path) -> Contents:
    """All that is below a folder: the type and permissions, and the content of files and links."""
    base = os.fsencode(folder)
    found: Contents = {}
    for directory, directories, files in os.walk(base):
        for name in (*directories, *files):
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            content = b""
            if os.path.islink(path):
                content = os.readlink(path)
            elif not os.path.isdir(path):
                with open(path, "rb") as stream:
                    content = stream.read()
            found[os.path.relpath(path, base)] = (mode, content)
    return found


def import_trees(folder: Path, trees: Mapping[str, Tree]) -> None:
    """All trees as commits, each on the branch of its name, of one repository in a folder, by one process."""
    folder.mkdir(exist_ok=True)
    run_tool("git", "init", "-q", "--bare", "repository", cwd=folder)
    pieces = []
    for branch, tree in trees.items():
        pieces.append(b"commit refs/heads/%s\n" % branch.encode())
        pieces.append(b"committer n <e@example.com> 0 +0000\ndata 0\ndeleteall\n")
        for name, file in tree.items():
            mode = b"120000" if file.is_link else b"100755" if file.executable else b"100644"
            pieces.append(b"M %s inline %s\n" % (mode, _quoted(name)))
            pieces.append(b"data %d\n%s\n" % (len(file.data), file.data))
    stdin = b"".join(pieces) + b"done\n"
    run_tool("git", "fast-import", "--quiet", "--done", cwd=folder / "repository", stdin=stdin)


class Generator:
    """Makes cases; `folder` is for the tools and may be removed afterwards."""

    def __init__(self, seed: int, folder: Path) -> None:
        self._seed = seed
        self._folder = folder

    def cases(self, count: int, start: int = 0) -> Iterator[Case]:
        drafts = [self._draft(number) for number in range(start, start + count)]
        self._import(drafts)
        for draft in drafts:
            if case := self._finish(draft):
                yield case

    def _draft(self, number: int) -> _Draft:
        rng = random.Random(f"{self._seed}/{number}")
        flavour = _flavour(rng)
        maker = Maker(rng, links=flavour.tool == "git", plain_names=flavour.tool == "diff")
        old = maker.tree()
        new, edits = maker.edited(old)
        return _Draft(number, rng, maker, flavour, old, new, edits)

    def _import(self, drafts: Sequence[_Draft]) -> None:
        trees = {}
        for draft in drafts:
            inside = b"".join(b"up%d/" % depth for depth in range(draft.flavour.strip - 1))
            for side, tree in (("old", draft.old), ("new", draft.new)):
                trees[f"{draft.number}/{side}"] = {inside + name: file for name, file in tree.items()}
        import_trees(self._folder, trees)

    def _finish(self, draft: _Draft) -> Case | None:
        text = self._git_diff(draft) if draft.flavour.tool == "git" else self._plain_diff(draft)
        if not any(line.startswith((b"diff --git", b"--- ", b"Binary")) for line in text.split(b"\n")):
            return None  # nothing changed that the tool knows a way to write
        reverse = draft.rng.random() < 0.25
        source, result = (draft.new, draft.old) if reverse else (draft.old, draft.new)
        situation, target = draft.maker.target(source, result)
        return Case(
            number=draft.number,
            old=draft.old,
            new=draft.new,
            target=target,
            text=text,
            flavour=draft.flavour,
            situation=situation,
            reverse=reverse,
            fuzz=draft.rng.choice([0, 0, 1, 2, 3]),
            edits=draft.edits,
        )

    def _git_diff(self, draft: _Draft) -> bytes:
        command = ["git", *draft.flavour.arguments]
        return run_tool(*command, f"{draft.number}/old", f"{draft.number}/new", cwd=self._folder / "repository")

    def _plain_diff(self, draft: _Draft) -> bytes:
        place = self._folder / "plain"
        inside = Path(*(f"up{depth}" for depth in range(draft.flavour.strip - 1)))
        for side, tree in (("old", draft.old), ("new", draft.new)):
            write_tree(place / side / inside, tree)
        try:
            return run_tool("diff", *draft.flavour.arguments, "old", "new", cwd=place, ok=(0, 1, 2))
        finally:
            shutil.rmtree(place)


class _Draft(NamedTuple):
    number: int
    rng: random.Random
    maker: Maker
    flavour: Flavour
    old: Tree
    new: Tree
    edits: tuple[str, ...]


def _flavour(rng: random.Random) -> Flavour:
    context = rng.choice(["-U3", "-U3", "-U0", "-U1", "-U10"])
    if rng.random() < 0.3:
        arguments = ("-rN", *rng.choice([(), ("-a",), ("-p",)]), context)
        return Flavour("diff", arguments, rng.choice([1, 1, 2, 3]))
    arguments = ("-c", f"core.quotePath={rng.choice(['true', 'false'])}", "diff", context)
    arguments += rng.choice([(), ("-M",), ("-M", "-C"), ("-M", "-C", "--find-copies-harder"), ("--no-renames",)])
    arguments += rng.choice([(), ("--binary",), ("--binary",), ("--full-index",), ("--binary", "-B"), ("--text",)])
    strip = rng.choice([0, 1, 1, 1, 2, 3])
    if strip == 0:
        arguments += ("--no-prefix",)
    return Flavour("git", arguments, strip)


def _quoted(name: bytes) -> bytes:
    return b'"' + b"".join(b"\\%03o" % byte for byte in name) + b'"'


def run_tool(*argv: str, cwd: Path, stdin: bytes = b"", ok: tuple[int, ...] = (0,)) -> bytes:
    """What a tool writes; a code that is not `ok` fails the test."""
    done = subprocess.run(argv, cwd=cwd, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=120)
    assert done.returncode in ok, (argv, done.stderr.decode("utf-8", "replace"))
    return done.stdout
