"""The command `migrate`, which every service with a schema has."""

from __future__ import annotations

import argparse


def add_migrate(commands: argparse._SubParsersAction[argparse.ArgumentParser], service: str) -> None:
    """Add the command; its argument `wait` is in seconds."""
    command = commands.add_parser("migrate", help=f"bring the database's {service} schema up to date")
    command.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for a database that does not answer",
    )
