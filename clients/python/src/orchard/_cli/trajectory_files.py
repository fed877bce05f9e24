"""Trajectories in files: formats, convert, import, export, curate."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard._cli.option_groups import with_options
from orchard._cli.output import FAILURE, USAGE, Json, check_folder, client, fail, pairs, print_json, show, table
from orchard._cli.trajectories import trajectories
from orchard._cli.trajectory_filters import with_filters

if TYPE_CHECKING:
    from orchard.data.export import Exported
    from orchard.data.options import ExportOptions
    from orchard.data.record import Record
    from orchard.data.report import Loss
    from orchard.data.sources import Source

__all__ = ["trajectories"]

Progress = Callable[[int, int | None], None]
Paths = Annotated[list[Path], typer.Argument(help="Files or folders.", metavar="PATH...", exists=True)]
From = Annotated[str, typer.Option("--from", help="Their format. Default: what their names and beginnings tell.")]
To = Annotated[str, typer.Option("--to", "-t", help="The format to write; `formats` lists them.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="A file, or a folder, as the format allows.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an output that is there; no folder with files.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin again what was broken off.")]


@dataclass(frozen=True, slots=True)
class Writing:
    """Options of the commands that write trajectories: how."""

    loss: Annotated[
        str, typer.Option("--loss", help="Which actions have loss: of resolved ones, of rises too, or all.")
    ] = "resolved"
    reward: Annotated[str, typer.Option("--reward", help="Which reward groups are trained on.")] = "outcome"
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest example.")] = None
    truncate: Annotated[str, typer.Option("--truncate", help="What happens to a longer one: drop or left.")] = "drop"
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", help="A tokenizer.json to count by; else an estimate.")
    ] = None
    recipe: Annotated[str, typer.Option("--recipe", help="Whose settings are stated in groups: swe, gui or claw.")] = (
        "swe"
    )
    environment: Annotated[str, typer.Option("--environment", help="Name that trainers show.")] = "orchard"
    overwrite: Overwrite = False
    restart: Restart = False

    def options(self) -> ExportOptions:
        """As the library has them.

        Raises:
            DataError: one has no such value.
        """
        from orchard.data.counting import counter_of
        from orchard.data.options import ExportOptions

        given = {name: getattr(self, name) for name in ("loss", "reward", "max_tokens", "truncate", "recipe")}
        return ExportOptions(**given, environment=self.environment, counter=counter_of(self.tokenizer))


@trajectories.command("formats")
def list_formats(json: Json = False) -> None:
    """List the formats of files, and what each carries."""
    from orchard.data import codecs

    found = [
        {
            "name": one.name,
            "read": one.read is not None,
            "write": one.writes,
            "lossless": one.lossless,
            "into": [container.value or "folder" for container in one.containers],
            "carries": sorted(str(what) for what in one.carries),
            "summary": one.summary,
        }
        for one in codecs().values()
    ]
    if json:
        print_json(found)
        return
    rows = [
        (
            str(one["name"]),
            "yes" if one["read"] else "",
            " ".join(map(str, one["into"])),  # type: ignore[call-overload]
            str(one["summary"]),
        )
        for one in found
    ]
    show(table(("FORMAT", "READ", "WRITE INTO", "WHAT"), rows))


@trajectories.command("convert")
@with_options("writing", Writing)
def convert(  # noqa: PLR0917 (options of the command line)
    writing: Writing,
    paths: Paths,
    to: To,
    output: Output,
    source_format: From = "",
    json: Json = False,
) -> None:
    """Write trajectories of files in another format; no platform is needed. Broken off, the same command goes on."""
    from orchard.data.sources import FileSource

    check_folder("--output", output)
    source = FileSource(tuple(paths), source_format)
    done = _export(source, to, output, writing, writing.options(), quiet=json)
    _tell(done, source.report.losses, "no trajectory was read", json=json)


@trajectories.command("export")
@with_filters
@with_options("writing", Writing)
def export_trajectories(
    filters: dict[str, Any],
    writing: Writing,
    to: To,
    output: Output,
    json: Json = False,
) -> None:
    """Write trajectories of the platform into a file, by filter. Broken off, the same command goes on."""
    from orchard.data.server import ServerSource

    check_folder("--output", output)
    options = writing.options()
    with client() as api:
        source = ServerSource(api, filters)
        done = _export(source, to, output, writing, options, quiet=json)
    _tell(done, (), "no trajectory matches", json=json)


@trajectories.command("import")
def import_trajectories(  # noqa: PLR0917 (options of the command line)
    paths: Paths,
    source_format: From = "",
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Put all into this dataset. Default: the one that a file names.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", "-l", metavar="KEY=VALUE", help="Give all this label too. Can be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only read, and say what could not be carried.")] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Also those that somebody is still writing there, in that one's place.")
    ] = False,
    json: Json = False,
) -> None:
    """Store trajectories of files on the platform. What is there already is not stored twice: repeat what broke off."""
    from orchard.data.repeats import without_repeats
    from orchard.data.sources import FileSource

    if dataset == "":
        raise typer.BadParameter("is empty: name a dataset, or leave it out", param_hint="--dataset")
    labels = pairs("--label", label)
    source = FileSource(tuple(paths), source_format)
    records = without_repeats(record for record, _ in source.records())
    if dataset or labels:
        records = (record.described(dataset=dataset or "", labels=labels) for record in records)
    with _counting("importing", quiet=json) as progress:
        if dry_run:
            stored, new = _read_all(records, progress)
        else:
            typed = {f"labels[{key!r}]" for key in labels} | ({"task.dataset"} if dataset else set())
            stored, new = _store_all(records, take_over, typed, progress)
    losses = source.report.losses
    if not stored:
        typer.echo("no trajectory was read", err=True)
    if json:
        print_json({"trajectories": stored, "new": new, "losses": list(losses)})
        return
    typer.echo(f"read {stored} trajectories" if dry_run else f"stored {stored} trajectories, {new} of them new")
    _show_losses(losses)


def _read_all(records: Iterable[Record], progress: Progress) -> tuple[int, int]:
    """How many there are, none of them stored."""
    count = 0
    for _ in records:
        count += 1
        progress(count, None)
    return count, 0


def _store_all(
    records: Iterable[Record], take_over: bool, typed: Collection[str], progress: Progress
) -> tuple[int, int]:
    """How many were stored, and how many of them are new. `typed`: fields that the command line gave them."""
    from orchard import InvalidArgument
    from orchard.data import DataError
    from orchard.data.server import store_all

    stored = new = 0
    try:
        with client() as api:
            for one in store_all(api, records, take_over=take_over):
                new += one.new
                stored += 1
                progress(stored, None)
    except BaseException as error:
        if stored:
            done = f"stored {stored} trajectories, {new} of them new, until it broke off"
            typer.echo(f"{done}; the same command goes on", err=True)
        if isinstance(error, InvalidArgument) and not isinstance(error, DataError):
            # As a rule what a file says is wrong, and not what was typed.
            ours = any(one.field.endswith(tuple(typed)) for one in error.violations)
            fail(error, code=USAGE if ours else FAILURE)
        raise
    return stored, new


@trajectories.command("curate")
@with_filters
def curate(  # noqa: PLR0917 (options of the command line)
    filters: dict[str, Any],
    plan: Annotated[Path, typer.Argument(help="The plan, a YAML file.")],
    output: Output,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Files or folders to choose from. Default: the platform.", metavar="[PATH...]", exists=True
        ),
    ] = None,
    source_format: From = "",
    like: Annotated[
        Path | None,
        typer.Option("--like", help="A manifest that the dataset must agree with: make it again.", exists=True),
    ] = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    json: Json = False,
) -> None:
    """Make a dataset by a plan: choose trajectories, write them, and say what was kept, what not, and why."""
    from orchard.data import DataError, MissingExtraError
    from orchard.data.curation.plan import load_plan
    from orchard.data.sources import FileSource

    check_folder("--output", output)
    try:
        read = load_plan(plan)
    except MissingExtraError:
        raise
    except DataError as error:
        fail(error, code=USAGE)
    if paths and filters:
        raise typer.BadParameter("filters are for the platform; a plan's `where` does the same", param_hint="PATH")
    if paths:
        _curate(FileSource(tuple(paths), source_format), read, output, overwrite, restart, like, json)
        return
    from orchard.data.server import ServerSource

    with client() as api:
        _curate(ServerSource(api, filters), read, output, overwrite, restart, like, json)


def _curate(  # noqa: PLR0917 (options of the command line)
    source: Source, plan: Any, output: Path, overwrite: bool, restart: bool, like: Path | None, json: bool
) -> None:
    from orchard.data.curation.manifest import make_dataset

    with _counting("curating", quiet=json) as progress:
        made = make_dataset(source, plan, output, overwrite, restart, like, lambda read: progress(read, None), progress)
    chosen = made.chosen
    if not chosen.fates:
        typer.echo("no trajectory matches", err=True)
    if json:
        print_json(
            {
                "read": len(chosen.fates),
                "kept": len(chosen.kept),
                "rows": made.exported.rows,
                "output": str(made.exported.output),
                "sha256": made.exported.sha256,
                "manifest": str(made.manifest),
                "report": str(made.report),
                "steps": list(chosen.steps),
                "losses": list(made.exported.losses),
            }
        )
        return
    rows = [
        (step.name, str(step.before), str(step.after), "; ".join(f"{n} {why}" for why, n in step.reasons.items()))
        for step in chosen.steps
    ]
    show(table(("STEP", "BEFORE", "AFTER", "DROPPED"), rows))
    typer.echo(f"kept {len(chosen.kept)} of {len(chosen.fates)} trajectories, {made.exported.rows} rows: {output}")
    typer.echo(f"what became of each: {made.report.name}; to make it again: --like {made.manifest.name}")
    _show_losses(made.exported.losses)


def _export(
    source: Source, to: str, output: Path, writing: Writing, options: ExportOptions, *, quiet: bool
) -> Exported:
    from orchard.data import codec
    from orchard.data.export import export

    with _counting("exporting", quiet=quiet) as progress:
        return export(source, codec(to), output, options, writing.overwrite, writing.restart, progress)


def _tell(done: Exported, read_losses: Iterable[Loss], nothing: str, *, json: bool) -> None:
    """Say what was written, and with the words of `nothing` that it is nothing."""
    if not done.records:
        typer.echo(nothing, err=True)
    losses = [*read_losses, *done.losses]
    if json:
        print_json(
            {
                "output": str(done.output),
                "read": done.records,
                "rows": done.rows,
                "resumed": done.resumed,
                "sha256": done.sha256,
                "losses": losses,
            }
        )
        return
    again = f" ({done.resumed} of them before it was broken off)" if done.resumed else ""
    typer.echo(f"read {done.records}{again}, wrote {done.rows} rows: {done.output}")
    _show_losses(losses)


def _show_losses(losses: Iterable[Loss]) -> None:
    """What was not carried, for people, on stderr: the most frequent first."""
    found = list(losses)
    for loss in found[:20]:
        times = f"{loss.count} times, first" if loss.count > 1 else "in"
        what = "left out" if loss.what == "record" else f"not carried: {loss.what}"
        typer.echo(f"{what}: {loss.why} ({times} {loss.first})", err=True)
    if len(found) > 20:
        typer.echo(f"and {len(found) - 20} more kinds; --json has them all", err=True)


@contextmanager
def _counting(text: str, *, quiet: bool) -> Iterator[Progress]:
    """Counts on stderr around work, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _rows: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:

        def progress(done: int, rows: int | None) -> None:
            written = "" if rows is None else f", {rows:,} rows"
            status.update(f"{text}: {done:,} trajectories{written}")

        yield progress
