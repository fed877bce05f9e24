"""Tells the commits of a series of diffs apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.exec_agent.files.patch.model import Action, FilePatch


def number_commits(patches: Sequence[FilePatch]) -> list[FilePatch]:
    """Number the commits from 0.

    Text between sections, as a mail's header, begins another; the patches come numbered by that. Diffs that follow each
    other without any, as of two calls of `git diff`, are told apart by what no single diff does: it takes each file
    in one section only, copies aside, and gives each path its content in one only. Between the two sections that no
    diff has together the next one begins where names, which git sorts, start again; at the second if they do not.
    """
    numbered: list[FilePatch] = []
    took: dict[bytes, int] = {}
    gave: dict[bytes, int] = {}
    made: dict[bytes, int] = {}
    starts: set[int] = set()
    begin = descent = 0
    for position, patch in enumerate(patches):
        if position and patch.commit != patches[position - 1].commit:
            begin = position
        elif position and patch.path < patches[position - 1].path:
            descent = position
        takes = b"" if patch.action in {Action.CREATE, Action.COPY} else patch.old_path
        gives = b"" if patch.action is Action.DELETE else patch.path
        rival = max(took.get(takes, -1), gave.get(gives, -1), -1 if gives else made.get(takes, -1))
        if rival >= begin:
            begin = descent if descent > rival else position
            starts.add(begin)
        if takes:
            took[takes] = position
        if gives:
            gave[gives] = position
        if patch.action is Action.CREATE:
            made[patch.path] = position
    more = 0
    for position, patch in enumerate(patches):
        more += position in starts
        numbered.append(replace(patch, commit=patch.commit + more))
    return numbered
