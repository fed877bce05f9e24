"""What is said of a command line that cannot be meant: which option was perhaps wanted, and between which bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import typer

_SYNONYMS: Final[Mapping[str, Sequence[str]]] = {
    "--cwd": ("--workdir",),
    "--working-directory": ("--workdir",),
    "--working-dir": ("--workdir",),
    "--dir": ("--workdir",),
    "--environment": ("--env",),
    "--background": ("--detach",),
    "--interactive": ("--stdin",),
    "--input": ("--stdin",),
    "--time-limit": ("--timeout",),
    "--expires": ("--ttl",),
    "--cpus": ("--cpu",),
    "--mem": ("--memory",),
    "--ram": ("--memory",),
    "--tag": ("--label",),
    "--name": ("--id", "--label"),
    "--format": ("--to", "--from"),
    "--out": ("--output",),
    "--force": ("--overwrite", "--yes", "--fresh"),
    "--resume": ("--batch",),
    "--max-cost": ("--max-usd",),
    "--budget": ("--max-usd", "--max-tokens"),
    "--model": ("--judge",),
    "--samples": ("--votes", "--maximum", "--count"),
    "--max": ("--limit", "--maximum", "--count"),
}
"""What options are called elsewhere, and here; a command is offered those that it has."""


@contextmanager
def explained() -> Iterator[None]:
    """Errors of usage say more: near names of an option that is not known, bounds of a number."""
    try:
        yield
    except Exception as error:
        # By their fields: the parser comes from typer or from click, whose classes differ.
        if hasattr(error, "possibilities") and hasattr(error, "option_name"):
            error.possibilities = sorted({*(error.possibilities or ()), *_meant(error)})
        elif isinstance(error, typer.BadParameter) and (bounds := _bounds(getattr(error, "param", None))):
            error.message = f"{error.message}; it is {bounds}"
        raise


def _meant(error: Any) -> Sequence[str]:
    """Options of the command that are called otherwise elsewhere."""
    command = getattr(error.ctx, "command", None)
    known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
    return [name for name in _SYNONYMS.get(error.option_name, ()) if name in known]


def _bounds(parameter: Any) -> str:
    """Of a number; older parsers keep them in its type."""
    kind = parameter if hasattr(parameter, "min") else getattr(parameter, "type", None)
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if least is None and most is None:
        return ""
    if most is None:
        return f"at least {least:,}"
    return f"at most {most:,}" if least is None else f"from {least:,} to {most:,}"
