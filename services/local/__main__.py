"""`python -m services.local up`: the commands of this package without the `orchard` command line."""

from __future__ import annotations

import typer

from services.local import commands


def main() -> None:
    """Run one command."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        # Boxes would break the paths in errors over lines.
        rich_markup_mode=None,
    )
    app.command("up")(commands.up)
    app.command("demo")(commands.demo)
    app.add_typer(commands.image, name="image")
    app()


if __name__ == "__main__":
    main()
