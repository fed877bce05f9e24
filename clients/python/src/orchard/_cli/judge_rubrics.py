"""Rubrics: list, show, put."""

from __future__ import annotations

import json as json_module
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard._cli.output import Json, client, print_json, show, table

if TYPE_CHECKING:
    from orchard import Rubric

rubrics = typer.Typer(help="Criteria with weights that the kind rubric judges by.", no_args_is_help=True)


def complete_rubric(incomplete: str) -> list[tuple[str, str]]:
    """Names of rubrics, for the shell's completion; none if the platform does not answer at once."""
    from orchard import OrchardError, SandboxClient

    try:
        with SandboxClient(retry_timeout=0.5) as api:
            return [(one.name, one.description) for one in api.judge.rubrics() if one.name.startswith(incomplete)]
    except OrchardError:
        return []


def parse_name(text: str) -> tuple[str, int]:
    """(name, version) of NAME or NAME@VERSION; 0 is the newest.

    Raises:
        typer.BadParameter: the version is no number.
    """
    name, at, version = text.partition("@")
    if at and not (version.isascii() and version.isdigit()):
        raise typer.BadParameter(f"{text!r} must be NAME, or NAME@VERSION with a number", param_hint="RUBRIC")
    return name, int(version or 0)


@rubrics.command("list")
def list_rubrics(json: Json = False) -> None:
    """List the newest version of each rubric, built-in ones included."""
    with client() as api:
        found = list(api.judge.rubrics())
    if json:
        print_json(found)
        return
    rows = [(one.name, str(one.version), str(len(one.criteria)), one.description) for one in found]
    show(table(("NAME", "VERSION", "CRITERIA", "DESCRIPTION"), rows))


@rubrics.command("show")
def show_rubric(
    rubric: Annotated[
        str, typer.Argument(help="Its name, or NAME@VERSION.", metavar="RUBRIC", autocompletion=complete_rubric)
    ],
    json: Json = False,
) -> None:
    """Show a rubric's criteria. What --json prints is a file for `put`."""
    name, version = parse_name(rubric)
    with client() as api:
        found = api.judge.rubric(name, version)
    _show(found, json=json)


@rubrics.command("put")
def put_rubric(
    file: Annotated[
        Path,
        typer.Argument(
            help='JSON: {"name": "mine", "criteria": [{"name": "care", "description": "How carefully ...?", '
            '"weight": 1}]}, with weights that add up to 1. May also have "description" and "step" (of scores: 0.1, '
            '0.2, 0.5 or 1), and "uses_gold" in a criterion.',
            exists=True,
            dir_okay=False,
            metavar="FILE",
        ),
    ],
    json: Json = False,
) -> None:
    """Store a rubric. One that a verdict rests on is never changed: the next becomes its next version."""
    given = _read(file)
    with client() as api:
        stored = api.judge.put_rubric(given)
    _show(stored, json=json)


def _show(rubric: Rubric, *, json: bool) -> None:
    if json:
        print_json(rubric)
        return
    typer.echo(f"{rubric.name}@{rubric.version}: scores in steps of {rubric.step:g}. {rubric.description}".strip())
    rows = [(one.name, f"{one.weight:g}", "yes" if one.uses_gold else "", one.description) for one in rubric.criteria]
    show(table(("CRITERION", "WEIGHT", "USES GOLD", "QUESTION"), rows))


def _read(file: Path) -> Rubric:
    """The rubric of a file. What the platform sets, such as the version, may stand there and is not looked at.

    Raises:
        typer.BadParameter: it is none; says where.
    """
    from orchard import Criterion, Rubric

    def refuse(why: str) -> typer.BadParameter:
        return typer.BadParameter(f"{file}: {why}", param_hint="FILE")

    try:
        given = json_module.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError as error:  # no JSON, or no text
        raise refuse(f"no JSON ({error})") from None
    criteria = given.pop("criteria", None) if isinstance(given, dict) else None
    if not isinstance(criteria, list) or not all(isinstance(one, dict) for one in criteria):
        raise refuse('must be {"name": ..., "criteria": [{"name": ..., "description": ..., "weight": ...}, ...]}')
    needed = {"name": str, "description": str, "weight": float}
    try:
        made = [
            Criterion(**_checked(one, f"criteria[{n}].", Criterion, needed, {"uses_gold": bool}))
            for n, one in enumerate(criteria)
        ]
        return Rubric(criteria=made, **_checked(given, "", Rubric, {"name": str}, {"description": str, "step": float}))
    except ValueError as error:
        raise refuse(str(error)) from None


def _checked(
    given: dict[str, Any], place: str, kind: type[Any], needed: dict[str, type], more: dict[str, type]
) -> dict[str, Any]:
    """The fields that a user sets.

    Raises:
        ValueError: one is missing, unknown, or of another type.
    """
    known = needed | more
    for name, expected in known.items():
        if name not in given and name in needed:
            raise ValueError(f"{place}{name} is missing")
        types = (int, float) if expected is float else (expected,)
        value = given.get(name)
        if name in given and (not isinstance(value, types) or (isinstance(value, bool) and expected is not bool)):
            raise ValueError(f"{place}{name} must be {_TYPES[expected]}, not {value!r}")
    unknown = given.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise ValueError(f"{place}{min(unknown)} is no field; there are {', '.join(known)}")
    return {name: value for name, value in given.items() if name in known}


_TYPES = {str: "a text", float: "a number", bool: "true or false"}
