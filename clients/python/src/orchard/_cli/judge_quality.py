"""How good judges are: calibrate against people, drift between two batches."""

from __future__ import annotations

import csv
import json as json_module
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from orchard._cli.output import Json, check_folder, client, print_json, show, table

if TYPE_CHECKING:
    from orchard import SandboxClient, Verdict
    from orchard.rewards.agreement import Bin, Confusion, Drift

_YES: Final = frozenset({"1", "1.0", "true", "yes", "y"})
_NO: Final = frozenset({"0", "0.0", "-1", "false", "no", "n"})
_VALUE: Final = "label"
"""The column of labels that are of the verdict itself; others are of criteria."""
_WIDTH: Final = 30
_BINS: Final = 10

Threshold = Annotated[float, typer.Option("--threshold", min=0, max=1, help="A verdict of at least this says yes.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Also write the plot as SVG.", dir_okay=False, metavar="FILE.svg")
]
Labels = Mapping[str, Mapping[str, bool]]
"""By id, then by column."""


def calibrate(
    labels: Annotated[
        Path,
        typer.Argument(
            help="Labels of people, yes or no, 1 or 0: CSV lines ID,LABEL, with a first line id,label,CRITERION,... "
            'also of criteria; or JSON lines {"id": ..., "label": ..., "CRITERION": ...}.',
            exists=True,
            dir_okay=False,
        ),
    ],
    batch_id: Annotated[
        str | None,
        typer.Option("--batch", help="Ids are items of this batch, such as trajectories. Default: verdicts."),
    ] = None,
    threshold: Threshold = 0.5,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Compare verdicts with labels that people gave: counts, accuracy and Cohen's kappa, also by criterion.

    The plot shows how many people say yes to by what the judge says: where its values are chances, both are equal.
    """
    from orchard.rewards.agreement import confusion, reliability

    check_folder("--plot", plot)
    given = _labels(labels)
    with client() as api:
        verdicts = _verdicts(api, given, batch_id)
    counts: dict[str, Confusion] = {}
    unscored: dict[str, int] = {}
    pairs: dict[str, list[tuple[float, bool]]] = {}
    for name in dict.fromkeys(name for columns in given.values() for name in columns):
        found = [(_value(verdicts[one], name), columns[name]) for one, columns in given.items() if name in columns]
        pairs[name] = [(value, label) for value, label in found if value is not None]
        counts[name] = confusion((value >= threshold, label) for value, label in pairs[name])
        unscored[name] = len(found) - len(pairs[name])
    bins = reliability(pairs.get(_VALUE, ()), _BINS)
    if json:
        rows = {name: _plain(counts[name]) | {"unscored": unscored[name]} for name in counts}
        criteria = {name: row for name, row in rows.items() if name != _VALUE}
        print_json({**rows.get(_VALUE, {}), "criteria": criteria, "reliability": [asdict(one) for one in bins]})
    else:
        columns = ("", "BOTH YES", "JUDGE ALONE", "LABEL ALONE", "BOTH NO", "ACCURACY", "KAPPA", "NO NUMBER")
        show(table(columns, [_row(name, counts[name], unscored[name]) for name in counts]))
    _plot(
        ("JUDGE SAYS", "VERDICTS", "PEOPLE SAY YES", ""), [_bin_row(one) for one in bins if one.count], plot, json=json
    )


def drift(
    before: Annotated[str, typer.Argument(help="A batch.", metavar="BATCH")],
    after: Annotated[str, typer.Argument(help="Another one with the same items.", metavar="BATCH")],
    threshold: Threshold = 0.5,
    plot: Plot = None,
    json: Json = False,
) -> None:
    """Say what became of the same items' verdicts in another batch, as with another prompt, model or rubric.

    Judge the same trajectories twice, each time under its own --batch, and compare. Criteria are compared too.
    """
    from orchard.rewards.agreement import drift as compare

    check_folder("--plot", plot)
    with client() as api:
        old, new = ({item.item_id: item.verdict for item in api.judge.items(name)} for name in (before, after))
    if not old.keys() & new.keys():
        raise typer.BadParameter(f"batches {before!r} and {after!r} have no item in common", param_hint="BATCH")
    names = [_VALUE, *sorted({name for verdict in (*old.values(), *new.values()) for name in verdict.scores})]
    found = {
        name: compare(
            {one: _value(verdict, name) for one, verdict in old.items()},
            {one: _value(verdict, name) for one, verdict in new.items()},
            threshold=threshold,
        )
        for name in names
    }
    prompts = [sorted({verdict.provenance.prompt_version for verdict in batch.values()}) for batch in (old, new)]
    changes = [
        after_value - before_value
        for one in old.keys() & new.keys()
        if (before_value := old[one].value) is not None and (after_value := new[one].value) is not None
    ]
    if json:
        rows = {
            name: asdict(one) | {"changed": one.changed, "kappa": one.decisions.kappa} for name, one in found.items()
        }
        print_json({"prompts": prompts, "value": rows.pop(_VALUE), "criteria": rows})
    else:
        typer.echo(f"prompts: {', '.join(prompts[0])} in {before}, {', '.join(prompts[1])} in {after}")
        columns = ("", "ITEMS", "BOTH SCORED", "BEFORE", "AFTER", "CHANGE", "ABSOLUTE", "OTHER ANSWER", "KAPPA")
        show(table(columns, [_drift_row(name, one) for name, one in found.items()]))
    _plot(("CHANGE", "ITEMS", ""), _change_rows(changes), plot, json=json)


def _verdicts(api: SandboxClient, labels: Labels, batch_id: str | None) -> dict[str, Verdict]:
    """What was judged, by the ids of the labels."""
    if batch_id is None:
        return {one: api.judge.get(one) for one in labels}
    items = {item.item_id: item.verdict for item in api.judge.items(batch_id)}
    missing = next((one for one in labels if one not in items), None)
    if missing is not None:
        raise typer.BadParameter(f"batch {batch_id!r} has no verdict of {missing!r}", param_hint="LABELS")
    return items


def _value(verdict: Verdict, name: str) -> float | None:
    return verdict.value if name == _VALUE else verdict.scores.get(name)


def _plain(counts: Confusion) -> dict[str, Any]:
    return {**asdict(counts), "accuracy": counts.accuracy, "kappa": counts.kappa}


def _row(name: str, counts: Confusion, unscored: int) -> tuple[str, ...]:
    return (
        "verdict" if name == _VALUE else name,
        str(counts.true_positive),
        str(counts.false_positive),
        str(counts.false_negative),
        str(counts.true_negative),
        "undefined" if counts.accuracy is None else f"{counts.accuracy:.1%}",
        _kappa(counts),
        str(unscored or ""),
    )


def _kappa(counts: Confusion) -> str:
    return "undefined: all are the same" if counts.kappa is None else f"{counts.kappa:.3f}"


def _drift_row(name: str, found: Drift) -> tuple[str, ...]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return (
        "verdict" if name == _VALUE else name,
        str(found.items),
        str(found.scored),
        shown(found.mean_before, ".3f"),
        shown(found.mean_after, ".3f"),
        shown(found.mean_change, "+.3f"),
        shown(found.mean_absolute_change, ".3f"),
        str(found.changed),
        _kappa(found.decisions),
    )


def _bin_row(one: Bin) -> tuple[str, ...]:
    share = one.positive_share or 0.0
    return (f"{one.low:.1f} to {one.high:.1f}", str(one.count), f"{share:.0%}", "█" * round(share * _WIDTH))


def _change_rows(changes: Sequence[float]) -> list[tuple[str, ...]]:
    """How many items changed by how much, in steps of 0.1."""
    counts: dict[int, int] = {}
    for change in changes:
        step = round(change * _BINS)
        counts[step] = counts.get(step, 0) + 1
    most = max(counts.values(), default=1)
    return [
        (f"{step / _BINS:+.1f}", str(count), "█" * max(1, round(count / most * _WIDTH)))
        for step, count in sorted(counts.items())
    ]


def _plot(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], file: Path | None, *, json: bool) -> None:
    """Show bars for people, and write them where they are asked for."""
    from rich.console import Console

    drawn = table(columns, rows)
    if not json:
        show(drawn)
    if file is not None:
        with Path("/dev/null").open("w", encoding="utf-8") as nowhere:
            recorder = Console(record=True, width=100, file=nowhere, force_terminal=True)
            recorder.print(drawn)
            recorder.save_svg(str(file), title="orchard judge")


def _labels(path: Path) -> dict[str, dict[str, bool]]:
    """Labels of a file.

    Raises:
        typer.BadParameter: a line is none; says which.
    """
    found: dict[str, dict[str, bool]] = {}
    header = ["id", _VALUE]
    try:
        # With or without the mark that spreadsheets write first.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{path} is no text in UTF-8: byte {error.start}", param_hint="LABELS") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if not found and line.lower().startswith("id,"):
            header = [name.strip() for name in next(csv.reader([line]))]
            header[0] = "id"
            continue
        label = _label(line, header)
        if label is None:
            raise typer.BadParameter(
                f"line {number} of {path} is neither {','.join(header).upper()} nor a JSON object of them, "
                "with yes or no",
                param_hint="LABELS",
            )
        if label[0] in found:
            raise typer.BadParameter(f"line {number} of {path} labels {label[0]!r} again", param_hint="LABELS")
        found[label[0]] = label[1]
    if not found:
        raise typer.BadParameter(f"{path} has no label", param_hint="LABELS")
    return found


def _label(line: str, header: Sequence[str]) -> tuple[str, dict[str, bool]] | None:
    try:
        if line.lstrip().startswith("{"):
            given = {str(name): str(value) for name, value in json_module.loads(line).items()}
        else:
            cells = next(csv.reader([line]))
            if len(cells) != len(header):
                return None
            given = dict(zip(header, cells, strict=True))
        name = given.pop("id").strip()
    except (ValueError, KeyError, AttributeError):
        return None
    words = {column: word.strip().lower() for column, word in given.items() if word.strip()}
    if not words or not name or not _YES.union(_NO).issuperset(words.values()):
        return None
    return name, {column: word in _YES for column, word in words.items()}
