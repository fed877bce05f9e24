"""Commands that other distributions add through the entry-point group `orchard.commands`.

An entry point is a typer.Typer, or a function with typer's annotations. One that cannot be loaded says so when it is
run and harms no other.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer

GROUP: Final = "orchard.commands"


def names() -> list[str]:
    """Names of the plugins' commands."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load(name: str) -> Any:
    """The command of a plugin; None if there is none of this name."""
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    return None if found is None else _command(found)


def _command(entry: EntryPoint) -> Any:
    try:
        return as_command(entry.name, entry.load())
    except Exception as error:  # noqa: BLE001 (whatever a plugin raises, the rest works)
        return as_command(entry.name, _broken(entry, error))


def as_command(name: str, plugin: Any) -> Any:
    """A Typer or a function as a command."""
    app = plugin
    if not isinstance(plugin, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command(name)(plugin)
    command = typer.main.get_command(app)
    command.name = name
    if isinstance(plugin, typer.Typer):
        command.params = [parameter for parameter in command.params if "completion" not in str(parameter.name)]
    return command


def _broken(entry: EntryPoint, error: Exception) -> Any:
    reason = f"{type(error).__name__}: {error}"

    def broken() -> None:
        typer.echo(f"orchard: the command {entry.name!r} ({entry.value}) cannot be loaded: {reason}", err=True)
        raise typer.Exit(1)

    broken.__doc__ = f"(cannot be loaded: {reason})"
    return broken
