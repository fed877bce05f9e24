"""Every command of the command line, by the words that call it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import typer
from orchard._cli.main import app


def commands() -> Mapping[tuple[str, ...], Any]:
    """The commands of this package; those of plugins apart, and not the groups that hold them."""
    return dict(_below((), typer.main.get_command(app)))


def _below(words: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name, one in inner.items():
        yield from _below((*words, name), one)


def options_of(command: Any) -> dict[str, Any]:
    """A command's options by the long name of each."""
    return {
        next(name for name in one.opts if name.startswith("--")): one
        for one in command.params
        if any(name.startswith("--") for name in one.opts)
    }
