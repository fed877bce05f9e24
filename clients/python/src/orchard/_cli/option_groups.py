"""Options that several commands share: listed once, given to each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

Command = Callable[..., None]


def with_options(parameter: str, group: type) -> Callable[[Command], Command]:
    """Give a command the options that are the fields of a dataclass; it gets one of them, made of what was given.

    Args:
        parameter: of the command, in whose place the options stand.
        group: the dataclass. The annotations of its fields are typer's, and each has a default.
    """
    hints = get_type_hints(group, include_extras=True)
    defaults = {field.name: None if field.default is MISSING else field.default for field in fields(group)}
    return lambda command: add_options(command, parameter, hints, defaults, lambda given: group(**given))


def add_options(
    command: Command,
    parameter: str,
    annotations: Mapping[str, Any],
    defaults: Mapping[str, Any],
    make: Callable[[dict[str, Any]], Any],
) -> Command:
    """Give a command options, before its last parameter; it gets what `make` makes of them.

    Args:
        command: has the parameter.
        parameter: that stands for them.
        annotations: of the options, by name.
        defaults: of those whose default is not None.
        make: of what was given, by name.
    """
    signature = inspect.signature(command)
    hints = get_type_hints(command, include_extras=True)
    own = [
        one.replace(annotation=hints.get(one.name, one.annotation))
        for one in signature.parameters.values()
        if one.name != parameter
    ]
    added = [
        inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults.get(name), annotation=annotation
        )
        for name, annotation in annotations.items()
    ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in annotations}
        command(**{parameter: make(options)}, **given)

    parameters = [*own[:-1], *added, *own[-1:]]
    run.__signature__ = signature.replace(parameters=parameters, return_annotation=None)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run
