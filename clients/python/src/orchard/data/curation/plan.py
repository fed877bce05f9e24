"""Plans: a curation in a YAML file, checked against a published JSON schema (`plan.schema.json` in this package)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from orchard.data.counting import counter_of
from orchard.data.curation import filters, selectors
from orchard.data.curation.near_duplicates import near_duplicates
from orchard.data.curation.pipeline import Curation, Step
from orchard.data.curation.yaml_lines import Document, read_yaml
from orchard.data.errors import DataError, MissingExtraError
from orchard.data.options import ExportOptions
from orchard.data.registry import codec

_OPTIONS: Final = ("loss", "reward", "max_tokens", "truncate", "recipe", "environment")


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan.

    Attributes:
        name: for people.
        curation: what to choose.
        format: how the dataset is written; empty: the plan does not say.
        options: how, in that format.
        tokenizer: the tokenizer's file; None: tokens are estimated.
        document: what the file says, for the manifest.
    """

    name: str
    curation: Curation
    format: str
    options: ExportOptions
    tokenizer: Path | None
    document: Mapping[str, Any]


def schema() -> dict[str, Any]:
    """The JSON schema of plans."""
    text = files("orchard.data.curation").joinpath("plan.schema.json").read_text(encoding="utf-8")
    value: dict[str, Any] = json.loads(text)
    return value


def load_plan(path: Path) -> Plan:
    """Read a plan.

    Raises:
        MissingExtraError: a package is missing.
        DataError: the plan has a mistake; the error names line, field and fix.
    """
    document = read_yaml(path)
    _check(document)
    value = document.value
    tokenizer = path.parent / value["tokenizer"] if "tokenizer" in value else None
    counter = counter_of(tokenizer)
    steps = []
    for index, item in enumerate(value["steps"]):
        ((name, given),) = item.items()
        steps.append(_step(document, index, name, given))
    export = value.get("export", {})
    options = ExportOptions(**{key: export[key] for key in _OPTIONS if key in export}, counter=counter)
    if "format" in export:
        _check_format(document, export["format"])
    curation = Curation(tuple(steps), value.get("seed", 0), counter)
    return Plan(value.get("name", ""), curation, export.get("format", ""), options, tokenizer, value)


def _step(document: Document, index: int, name: str, given: Any) -> Step:
    try:
        return _STEPS[name](given)
    except DataError as error:
        where = document.where(("steps", index, name))
        raise DataError(error.problem, where=where, fix=error.fix) from None


def _check_format(document: Document, name: str) -> None:
    try:
        one = codec(name)
    except DataError as error:
        raise DataError(error.problem, where=document.where(("export", "format")), fix=error.fix) from None
    if not one.writes:
        raise DataError(f"{name} can be read, not written", where=document.where(("export", "format")))


def _options(make: Callable[..., Step]) -> Callable[[Any], Step]:
    """A step whose options are an object, or true for none."""
    return lambda given: make() if given is True else make(**given)


_STEPS: Final[Mapping[str, Callable[[Any], Step]]] = {
    "status": filters.status,
    "outcome": filters.outcome,
    "max_tokens": filters.max_tokens,
    "turns": _options(filters.turns),
    "known_tools": lambda given: filters.known_tools(None if given is True else given),
    "parsable_actions": _options(filters.parsable_actions),
    "has_rise": lambda _: filters.has_rise(),
    "where": filters.where,
    "exclude": lambda given: filters.where(given, exclude=True),
    "random": _options(selectors.random),
    "diverse_repo": _options(selectors.diverse_repo),
    "concentrated_repo": _options(selectors.concentrated_repo),
    "multi_file": _options(selectors.multi_file),
    "large_diff": _options(selectors.large_diff),
    "composite": _options(selectors.composite),
    "shortest_per_task": _options(selectors.shortest_per_task),
    "cap": _options(selectors.cap),
    "balance": lambda _: selectors.balance(),
    "near_duplicates": _options(near_duplicates),
}


def _check(document: Document) -> None:
    try:
        from jsonschema import Draft202012Validator
    except ImportError:
        raise MissingExtraError("a plan file", "jsonschema", "data") from None
    errors = list(Draft202012Validator(schema()).iter_errors(document.value))
    if not errors:
        return
    # The first in the file; of several in one line the deepest.
    placed = [(document.where(_path(error)), error) for error in map(_deepest, errors)]
    where, error = min(placed, key=lambda pair: (pair[0].line, -len(pair[1].absolute_path)))
    problem, fix = _sentence(error)
    raise DataError(problem, where=where, fix=fix)


def _deepest(error: Any) -> Any:
    """Of alternatives the one whose type fits, so that the message is about what was meant."""
    while error.validator == "anyOf":
        # An error within an alternative, or of its kind but not of its type.
        inner = len(error.absolute_path)
        fitting = [one for one in error.context if len(one.absolute_path) > inner or one.validator not in _KINDS]
        if not fitting:
            return error
        error = fitting[0]
    return error


def _path(error: Any) -> list[str | int]:
    path = list(error.absolute_path)
    if error.validator == "additionalProperties":
        path += _unknown(error)[:1]
    elif error.validator == "required":
        path += [key for key in error.validator_value if key not in error.instance][:1]
    elif error.validator == "pattern":
        path.append(error.instance)
    return path


def _unknown(error: Any) -> list[str]:
    return [str(key) for key in error.instance if key not in error.schema.get("properties", {})]


def _sentence(error: Any) -> tuple[str, str]:
    """What is wrong with a value, and what to do about it."""
    value, wanted = error.instance, error.validator_value
    match error.validator:
        case "additionalProperties":
            known = sorted(error.schema.get("properties", {}))
            close = difflib.get_close_matches(_unknown(error)[0], known, 1)
            return "is not known", f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}"
        case "required":
            return "is missing", "add it"
        case "enum":
            return f"is {value!r}", f"use one of {', '.join(map(str, wanted))}"
        case "const":
            return f"is {value!r}", f"write {json.dumps(wanted)}"
        case "type":
            return f"is {json.dumps(value, default=str)}", f"give {_TYPES.get(wanted, wanted)}"
        case "minimum" | "exclusiveMinimum":
            return f"is {value}", f"give {'at least' if error.validator == 'minimum' else 'more than'} {wanted}"
        case "exclusiveMaximum":
            return f"is {value}", f"give less than {wanted}"
        case "minItems" | "minProperties":
            return "is empty", "name at least one" if error.validator == "minItems" else "name a step"
        case "maxProperties":
            return f"has {len(value)} steps in one item: {', '.join(map(str, value))}", "begin each with a dash"
        case "pattern":
            return "is no field of a trajectory", "use dataset, instance_id, repo, website, ... or label.KEY"
        case "anyOf":
            return f"is {json.dumps(value, default=str)}", "write true, or its options"
    return str(error.message), ""


_KINDS: Final = frozenset({"type", "const"})
_TYPES: Final = {
    "object": "keys and values",
    "array": "a list",
    "string": "a text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
}
