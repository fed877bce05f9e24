"""Options that several commands share are the same in each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from orchard._cli.option_groups import with_options
from typer.testing import CliRunner

from tests.unit.cli.every_command import commands, options_of


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [
        (("trajectories", "convert"), ("trajectories", "export"), 9),
        (("judge", "run"), ("judge", "batch"), 10),
        (("judge", "run"), ("judge", "compare"), 6),
    ],
)
def test_a_shared_option_is_the_same_everywhere(one: tuple[str, ...], other: tuple[str, ...], shared: int) -> None:
    first, second = (options_of(commands()[words]) for words in (one, other))
    both = first.keys() & second.keys() - {"--json", "--to", "--output"}
    assert len(both) >= shared
    for name in both:
        told = [(option.help, option.default, option.opts) for option in (first[name], second[name])]
        assert told[0] == told[1]


@dataclass(frozen=True)
class Size:
    """A group of options."""

    width: Annotated[int, typer.Option("--width", min=1)] = 3
    names: Annotated[list[str] | None, typer.Option("--name", "-n")] = None


def test_a_command_gets_its_group_of_options() -> None:
    app = typer.Typer()

    @app.command()
    @with_options("size", Size)
    def draw(what: str, size: Size, loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
        """Draw something."""
        typer.echo(f"{what} {size.width} {size.names} {loud}")

    runner = CliRunner()
    assert runner.invoke(app, ["box"]).stdout == "box 3 None False\n"
    assert runner.invoke(app, ["box", "--width", "9", "-n", "a", "-n", "b", "--loud"]).stdout == (
        "box 9 ['a', 'b'] True\n"
    )
    assert runner.invoke(app, ["box", "--width", "0"]).exit_code == 2
