"""Patches: bytes in, a plan of changes out. Pure Python, no I/O, no git.

    patches = parse(text, strip=1)
    plan = make_plan(patches, tree, options)

`tree` shows the files as they are; whoever calls carries the plan's changes out.
"""

from services.exec_agent.files.patch.hunks import HunkResult
from services.exec_agent.files.patch.model import (
    Action,
    Entry,
    FilePatch,
    PatchMalformedError,
    PatchPathError,
    UnpatchableError,
)
from services.exec_agent.files.patch.parse import parse
from services.exec_agent.files.patch.plan import (
    Change,
    FileResult,
    Options,
    Plan,
    Tree,
    make_plan,
)

__all__ = [
    "Action",
    "Change",
    "Entry",
    "FilePatch",
    "FileResult",
    "HunkResult",
    "Options",
    "PatchMalformedError",
    "PatchPathError",
    "Plan",
    "Tree",
    "UnpatchableError",
    "make_plan",
    "parse",
]
