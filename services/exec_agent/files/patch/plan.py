"""Works out what a patch makes of a tree, without changing anything."""

from __future__ import annotations

import stat
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, Protocol

from services.exec_agent.files.patch.content import binary_content, new_mode, refuse_hopeless, text_content
from services.exec_agent.files.patch.hunks import HunkResult
from services.exec_agent.files.patch.model import (
    NO_BINARY_DATA,
    Action,
    BinaryChange,
    Entry,
    FilePatch,
    PatchPathError,
    UnpatchableError,
)
from services.exec_agent.files.patch.occupied import Occupied, parents

_MAXIMUM_ATTEMPTS: Final = 8  # a chain of renames, each into the place of the next, would take one for each
_LINES_LEFT: Final = "the patch deletes the file, but lines would be left in it"


class Tree(Protocol):
    """The files as they are."""

    def read(self, path: bytes) -> Entry | None:
        """The file or link at a path relative to the target; None if nothing is there.

        Raises:
            PatchPathError: the path leads out of the target through a link.
            UnpatchableError: a directory, device or the like is there, or it cannot be read.
        """

    def holds_others(self, path: bytes, removed: Container[bytes]) -> bool | None:
        """Whether the directory at a path has a file in it, at any depth, that is not `removed`.

        None if no directory is there; a link to one is none.
        """


@dataclass(frozen=True, slots=True)
class Options:
    """How to apply.

    Attributes:
        reverse: undo the patch.
        fuzz: context lines at either end that may differ, 0 to 3.
        partial: take the hunks that fit even if others do not.
    """

    reverse: bool = False
    fuzz: int = 0
    partial: bool = False


@dataclass(frozen=True, slots=True)
class FileResult:
    """What became of one file of the patch; `error` says why it could not be patched as a whole."""

    path: bytes
    old_path: bytes
    action: Action
    hunks: tuple[HunkResult, ...] = ()
    error: str = ""

    @property
    def fits(self) -> bool:
        """Whether all of it fits."""
        return not self.error and not any(hunk.error for hunk in self.hunks)

    @property
    def takes_away(self) -> bool:
        """Of a removal or rename: whether it happens. A rename does also with hunks left out."""
        return self.fits or (self.action is Action.RENAME and not self.error)


@dataclass(frozen=True, slots=True)
class Change:
    """A path that ends up different: `before` and `after` are None where nothing is there."""

    path: bytes
    before: Entry | None
    after: Entry | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The report, and the changes to make: none if something does not fit, unless partial."""

    fits: bool
    results: tuple[FileResult, ...]
    changes: tuple[Change, ...]


def make_plan(patches: Sequence[FilePatch], tree: Tree, options: Options) -> Plan:
    """Work out the changes.

    Several patches may touch the same file, as in a series of commits: each sees what those before it made.

    Raises:
        PatchPathError: a path leads out of the target.
    """
    order = list(enumerate(patches))
    if options.reverse:
        order = [(index, patch.reversed()) for index, patch in reversed(order)]
    ordered = [patch for _index, patch in order]
    planner = _Planner(tree, options, ordered, {})
    results = planner.run()
    kept: dict[int, FileResult] = {}
    for attempt in range(_MAXIMUM_ATTEMPTS if options.partial else 0):
        staying = {
            position: result
            for position, result in results.items()
            if ordered[position].action in _REMOVING and position not in kept and not result.takes_away
        }
        if not staying:
            break
        # What counted on these files to go must not take their place.
        kept.update(staying)
        planner = _Planner(tree, options, ordered, kept, none_goes=attempt == _MAXIMUM_ATTEMPTS - 1)
        results = planner.run()
    by_index = {index: results[position] for position, (index, _patch) in enumerate(order)}
    report = tuple(by_index[index] for index in sorted(by_index))
    fits = all(result.fits for result in report)
    return Plan(fits, report, planner.changes() if fits or options.partial else ())


class _Planner:
    """One pass over the patches.

    Args:
        kept: patches that are known not to take their file away, with what became of them.
        none_goes: nothing may be made where a file is, though a later patch would take that away.
    """

    def __init__(
        self,
        tree: Tree,
        options: Options,
        patches: Sequence[FilePatch],
        kept: Mapping[int, FileResult],
        *,
        none_goes: bool = False,
    ) -> None:
        self._tree = tree
        self._options = options
        self._patches = patches
        self._kept = kept
        self._none_goes = none_goes
        self._position = 0
        self._originals: dict[bytes, Entry | None] = {}
        self._read: set[bytes] = set()
        self._state: dict[bytes, Entry | None] = {}
        # What the patches of one commit changed, as it was before: a rename or copy in it means that.
        self._before: dict[bytes, Entry | None] = {}
        self._made: set[bytes] = set()
        self._undone_copies: list[tuple[int, FilePatch, Entry, bytes]] = []
        # The last patch of a commit that takes a path away: until then one that shall be made may still be there.
        self._last_removal: dict[bytes, int] = {}
        # What the patches take away up to the end of this commit, and the directories of it.
        self._going: set[bytes] = set()
        self._emptied: set[bytes] = set()
        self._occupied = Occupied()

    def run(self) -> dict[int, FileResult]:
        """Apply all patches; returns what became of each."""
        results: dict[int, FileResult] = {}
        for _commit, patches in groupby(enumerate(self._patches), key=lambda numbered: numbered[1].commit):
            numbered = list(patches)
            self._begin_commit(numbered)
            for self._position, patch in numbered:
                kept = self._kept.get(self._position)
                results[self._position] = self._apply(patch) if kept is None else kept
            self._end_commit(results)
        return results

    def _begin_commit(self, patches: Sequence[tuple[int, FilePatch]]) -> None:
        for position, patch in () if self._none_goes else patches:
            if patch.action in _REMOVING and position not in self._kept:
                self._last_removal[patch.old_path] = position
        for path in self._last_removal:
            self._going.add(path)
            self._emptied.update(parents(path))
            self._occupied.mark(path, is_there=False)

    def _end_commit(self, results: dict[int, FileResult]) -> None:
        """Only when all of a commit is undone it shows whether a copy is what it was copied from."""
        for position, patch, present, data in self._undone_copies:
            origin = self._now(patch.copied_from)
            if data and (origin is None or (origin.data, origin.is_link) != (data, present.is_link)):
                self._state[patch.path] = present
                results[position] = replace(results[position], error=_LINES_LEFT)
        for path in self._last_removal:
            self._occupied.mark(path, is_there=self._state.get(path) is not None)
        self._last_removal.clear()
        self._undone_copies.clear()
        self._before.clear()
        self._made.clear()

    def _now(self, path: bytes) -> Entry | None:
        try:
            return self._current(path)
        except UnpatchableError:
            return None

    def _apply(self, patch: FilePatch) -> FileResult:
        """Apply one file's patch to the state."""
        result = FileResult(patch.path, patch.old_path if patch.action in _TWO_PATHS else b"", patch.action)
        try:
            patch = self._settled(patch)
            result = replace(result, path=patch.path, action=patch.action)
            refuse_hopeless(patch)
            source = self._source(patch)
            if patch.path != patch.old_path:
                self._check_free(patch)
            data, hunks = self._content(patch, source)
            result = replace(result, hunks=hunks)
            if any(hunk.error for hunk in hunks) and not self._options.partial:
                return result
            self._store(patch, source, data, hunks)
        except UnpatchableError as error:
            return replace(result, error=str(error))
        return result

    def _set(self, path: bytes, entry: Entry | None) -> None:
        if path not in self._before:
            self._before[path] = self._state[path] if path in self._state else self._original(path)
        self._state[path] = entry
        # What was made by this commit and goes with it again is in nobody's way.
        is_passing = self._before[path] is None and self._goes_later(path)
        self._occupied.mark(path, is_there=entry is not None and not is_passing)

    def changes(self) -> tuple[Change, ...]:
        """What differs from the tree, in the order in which it came up.

        Raises:
            PatchPathError: a file was read through a link that is itself changed, so there is no order to make both.
        """
        found = []
        for path, after in self._state.items():
            before = self._original(path)
            if after is None and before is None:
                continue
            if before is not None and after is not None and (before.data, before.mode) == (after.data, after.mode):
                continue
            if after is not None and path in self._read:
                self._refuse_changed_links(path)
            found.append(Change(path, before, after))
        return tuple(found)

    def _refuse_changed_links(self, path: bytes) -> None:
        for parent in parents(path):
            if parent in self._state and self._was_link(parent):
                shown = path.decode("utf-8", "replace")
                raise PatchPathError(path, f"the patch's path {shown!r} goes through a link that the patch changes")

    def _was_link(self, path: bytes) -> bool:
        original = self._originals.get(path)
        return original is not None and original.is_link

    def _original(self, path: bytes) -> Entry | None:
        if path not in self._originals:
            self._originals[path] = self._tree.read(path)
            self._read.add(path)
        return self._originals[path]

    def _current(self, path: bytes, *, taken: bool = False) -> Entry | None:
        """What is at a path by now. `taken`: it is asked for to take it elsewhere or away."""
        for parent in parents(path):
            if parent not in self._state:
                continue
            if taken and parent in self._emptied and (path in self._state or not self._was_link(parent)):
                continue  # what stands in the directory's place there came while the path was not yet gone
            above = self._state[parent]
            if above is None:
                # A file is removed there; nothing can be below it yet but what the patch makes.
                self._originals.setdefault(path, None)
                break
            if above.is_link:
                shown = path.decode("utf-8", "replace")
                raise PatchPathError(path, f"the patch's path {shown!r} goes through a link that the patch makes")
            raise UnpatchableError(f"{parent.decode('utf-8', 'replace')!r} is no directory")
        if path in self._state:
            return self._state[path]
        return self._original(path)

    def _settled(self, patch: FilePatch) -> FilePatch:
        """A plain diff does not say for sure which name it means, nor whether it makes the file: the tree decides."""
        if patch.problem == NO_BINARY_DATA and patch.action is Action.DELETE and patch.old_id:
            # For a removal nothing is missing: the full id says which content may go.
            return replace(patch, problem="", forward=BinaryChange(is_delta=False, payload=b""))
        if patch.action is not Action.MODIFY or self._current(patch.path) is not None:
            return patch
        if patch.alternate_path and self._current(patch.alternate_path) is not None:
            return replace(patch, path=patch.alternate_path, old_path=patch.alternate_path)
        first = patch.hunks[0] if patch.hunks else None
        if not patch.is_git and first is not None and not first.old and first.old_start == 0:
            return replace(patch, action=Action.CREATE, old_path=b"")
        return patch

    def _source(self, patch: FilePatch) -> Entry | None:
        """The file that the patch starts from; None if it makes one."""
        if patch.action is Action.CREATE:
            return None
        path = patch.old_path
        entry = self._current(path, taken=patch.action is not Action.MODIFY)
        if patch.action in _TWO_PATHS or self._is_replaced(path):
            # It means the file before this commit, whatever the commit moves there or changes in it.
            entry = self._before.get(path) or entry
        if entry is None:
            raise UnpatchableError(f"{path.decode('utf-8', 'replace')!r} does not exist")
        if not patch.old_mode and not patch.hunks and not patch.is_binary:
            return entry  # of a rename or copy that changes nothing git does not say what kind of file it is
        expects_link = stat.S_ISLNK(patch.old_mode)
        if entry.is_link and not expects_link:
            raise UnpatchableError("it is a symbolic link; the patch is for a regular file")
        if expects_link and not entry.is_link:
            raise UnpatchableError("it is a regular file; the patch is for a symbolic link")
        return entry

    def _check_free(self, patch: FilePatch) -> None:
        """A file that the patch makes must not be there, unless its commit takes it away later."""
        path = patch.path
        if path in self._occupied:
            raise UnpatchableError("it is a directory: the patch makes files in it")
        if path in self._emptied and path not in self._state:
            # A directory from which the patch takes files: the one made may take its place.
            others = self._tree.holds_others(path, self._going)
            if others:
                raise UnpatchableError("it is a directory, and the patch does not remove all that is in it")
            if others is not None:
                self._originals.setdefault(path, None)
        if any(
            self._last_removal.get(parent, -1) >= self._position and not self._is_replaced(parent)
            for parent in parents(path)
        ):
            # The other way round: a file that the patch removes later, or moves here, becomes a directory.
            self._originals.setdefault(path, None)
            present = self._state.get(path)
        else:
            present = self._current(path)
        if present is None or (self._goes_later(path) and path not in self._made):
            return
        if not patch.is_git and not present.data and not present.is_link:
            return  # a plain diff cannot tell an empty file from none
        raise UnpatchableError("it exists already")

    def _goes_later(self, path: bytes) -> bool:
        return self._last_removal.get(path, -1) > self._position

    def _content(self, patch: FilePatch, source: Entry | None) -> tuple[bytes, tuple[HunkResult, ...]]:
        data = source.data if source is not None else b""
        if patch.forward is not None:
            return binary_content(patch, patch.forward, data, source), ()
        data, results = text_content(patch, data, source, self._options.fuzz)
        return data, tuple(results)

    def _store(self, patch: FilePatch, source: Entry | None, data: bytes, hunks: tuple[HunkResult, ...]) -> None:
        if patch.action is Action.DELETE and source is not None:
            if any(hunk.error for hunk in hunks):
                return
            if patch.copied_from:
                self._undone_copies.append((self._position, patch, source, data))
            elif data:
                raise UnpatchableError(_LINES_LEFT)
            self._take_away(patch.old_path)
            return
        mode = new_mode(patch, source)
        if stat.S_ISLNK(mode) and (not data or b"\0" in data or len(data) > 4095):
            raise UnpatchableError("the patch makes a symbolic link, but its target is no path")
        if patch.action is Action.RENAME:
            self._take_away(patch.old_path)
        if patch.path != patch.old_path:
            self._made.add(patch.path)
        self._set(patch.path, Entry(data, mode, source.token if source is not None else None))

    def _take_away(self, path: bytes) -> None:
        if not self._is_replaced(path):
            self._set(path, None)

    def _is_replaced(self, path: bytes) -> bool:
        """Whether this commit made a file in the place of another: who takes that away leaves the new one."""
        return path in self._made and self._before[path] is not None


_TWO_PATHS: Final = frozenset({Action.RENAME, Action.COPY})
_REMOVING: Final = frozenset({Action.RENAME, Action.DELETE})
