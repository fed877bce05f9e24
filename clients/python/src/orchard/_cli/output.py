"""What is printed: JSON and tables on stdout, everything else on stderr."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import enum
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from orchard import SandboxClient
    from orchard._client import errors
    from orchard._client.transfers import Progress

FAILURE: Final = 1
USAGE: Final = 2
"""Exit codes: it failed; what was typed is wrong, and nothing was done."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, for programs.")]


def complete_sandbox(incomplete: str) -> list[tuple[str, str]]:
    """Ids of living sandboxes, for the shell's completion; none if the platform does not answer at once."""
    from orchard import OrchardError, SandboxClient

    try:
        with SandboxClient(retry_timeout=0.5) as client:
            return [(s.sandbox_id, s.image or "host") for s in client.list() if s.sandbox_id.startswith(incomplete)]
    except OrchardError:
        return []


SandboxId = Annotated[str, typer.Argument(help="The sandbox's id.", autocompletion=complete_sandbox)]


def complete_exec(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the commands of the sandbox that was typed before, newest first, for the shell's completion; none if the
    platform does not answer at once.
    """
    from orchard import OrchardError, SandboxClient

    try:
        with SandboxClient(retry_timeout=0.5) as client:
            found = client.attach(ctx.params.get("sandbox") or "").list_execs()
            return [(one.exec_id, one_line(one.command)) for one in found if one.exec_id.startswith(incomplete)]
    except OrchardError:
        return []


ExecId = Annotated[
    str,
    typer.Argument(
        help="The command's id, as `orchard exec -d` and `orchard ps` print it.",
        metavar="EXEC_ID",
        autocompletion=complete_exec,
    ),
]


@contextmanager
def client() -> Iterator[SandboxClient]:
    """A client for one command."""
    from orchard import SandboxClient

    with SandboxClient() as made:
        yield made


def fail(error: BaseException, *, code: int) -> NoReturn:
    """Say what went wrong, in one sentence with reason and fix, and exit."""
    print(f"orchard: {describe(error)}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(code) from None


def describe(error: BaseException) -> str:
    """One sentence on an error."""
    from orchard._client import errors

    if isinstance(error, OSError) and not isinstance(error, errors.OrchardError) and error.strerror:
        why = f"{error.strerror[:1].lower()}{error.strerror[1:]}"
        return f"{str(error.filename)!r}: {why}" if error.filename else why
    if not isinstance(error, errors.OrchardError):
        return str(error)
    text = error.message
    if error.reason and error.reason not in text:
        text += f" [{error.reason}]"
    fixes: Mapping[type[errors.OrchardError], str] = {
        errors.SandboxNotFound: "`orchard list --all` shows which there are",
        errors.ExecNotFound: "`orchard ps SANDBOX` shows which there are",
        errors.Unauthenticated: "check ORCHARD_API_KEY, or the profile that `orchard up` writes",
        errors.PlatformError: f"the platform's log has more under request id {error.request_id}",
        errors.ImageNotFound: "`orchard image list` shows which there are",
        errors.TrajectoryNotFound: "`orchard trajectories list` shows which there are",
    }
    fix = next((fix for kind, fix in fixes.items() if isinstance(error, kind)), "")
    fix = fix or _FIXES.get(error.reason, "") or _renamed(error)
    return f"{text}; {fix}" if fix else text


def _renamed(error: errors.OrchardError) -> str:
    """Which option is meant, where an error names a field that the command line calls otherwise."""
    fields = {violation.field.rpartition(".")[2] for violation in getattr(error, "violations", ())}
    return ", ".join(f"{field} is {_OPTIONS[field]}" for field in sorted({*fields, *error.metadata} & _OPTIONS.keys()))


_FIXES: Mapping[str, str] = {
    "EXEC_NOT_STARTED": "`orchard kill` without --signal cancels it",
    "ITEM_EXISTS": "a batch goes on with the options that it began with, --fresh too; others need another --batch",
    "GROUP_NOT_FOUND": "`orchard groups list` shows which there are",
    "RUBRIC_NOT_FOUND": "`orchard judge rubrics list` shows which there are",
    "VERDICT_NOT_FOUND": "ids of verdicts begin with vd-; of trajectories, name the --batch that judged them",
}
"""By reason, of errors that have no class of their own."""

_OPTIONS: Mapping[str, str] = {
    "creates_per_second": "--create-rate",
    "cwd": "--workdir",
    "group_by_label": "--group-by",
    "maximum_lifetime": "--lifetime",
    "outcome_state": "--outcome",
    "statuses": "--status",
    "working_directory": "--workdir",
}
"""Fields that have another name here than in the SDK and the protocol."""


def to_json(value: Any) -> Any:
    """Plain values of a dataclass. Bytes that are no text become {"base64": ...}."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(to_json(value), ensure_ascii=False, indent=2 if sys.stdout.isatty() else None))  # noqa: T201


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, cut: str = "") -> Any:
    """A table for people. Where the terminal is too narrow, cells take several lines, or the column `cut` is cut."""
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    made = Table(
        *(Column(name, no_wrap=bool(cut) and name != cut) for name in columns),
        box=box.SIMPLE_HEAD,
        header_style="bold",
        pad_edge=False,
    )
    for row in rows:
        cells = [Text(cell, style=_COLOURS.get(cell, "")) for cell in row]
        for name, cell in zip(columns, cells, strict=True):
            if name == cut:
                cell.no_wrap, cell.overflow = True, "ellipsis"
        made.add_row(*cells)
    return made


def one_line(text: str) -> str:
    """A text in one line, without characters that do something to a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in " ".join(text.split()))


_COLOURS: Mapping[str, str] = {
    "ready": "green",
    "starting": "yellow",
    "queued": "yellow",
    "running": "green",
    "failed": "red",
    "deleting": "dim",
    "deleted": "dim",
    "open": "yellow",
    "completed": "green",
    "closed": "green",
    "aborted": "dim",
    "scored": "green",
    "excluded": "red",
    "abstained": "yellow",
}


def show(renderable: Any, *, width: int = 200) -> None:
    """Print for people on stdout. Where that is no terminal, a table may be `width` characters wide."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else width, soft_wrap=False).print(renderable)


@contextmanager
def waiting(text: str, *, quiet: bool) -> Iterator[None]:
    """A spinner on stderr around a wait, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


@contextmanager
def transfer(text: str, *, quiet: bool) -> Iterator[Progress | None]:
    """A progress bar on stderr around a transfer, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def age(moment: dt.datetime | None, *, now: dt.datetime | None = None) -> str:
    """How long ago, or until when: "5s", "12m", "3h", "2d"; empty without a moment."""
    if moment is None:
        return ""
    seconds = abs(((now or dt.datetime.now(dt.UTC)) - moment).total_seconds())
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def moment(time: dt.datetime | None) -> str:
    """A point in time, in the local zone; empty without one."""
    return time.astimezone().isoformat(sep=" ", timespec="milliseconds") if time else ""


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def check_folder(option: str, file: Path | None) -> None:
    """Refuse a file whose folder is not there: one that is made without a word hides a slip in its name."""
    if file is not None and not file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(file.parent)!r}; make it first", param_hint=option)


def pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    """KEY=VALUE options as a dictionary."""
    found = {}
    for value in values or ():
        key, equals, rest = value.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"{value!r} is not KEY=VALUE", param_hint=option)
        found[key] = rest
    return found


def seconds(option: str, text: str | None) -> float | None:
    """Seconds of "90s", "10m" or "2h30m"."""
    if text is None:
        return None
    from orchard._client.errors import InvalidArgument
    from orchard._client.units import parse_time

    try:
        return parse_time(option, text)
    except InvalidArgument as error:
        raise typer.BadParameter(error.violations[0].description, param_hint=option) from None
