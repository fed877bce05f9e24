"""`orchard image`: the root file systems that sandboxes of this machine can start from."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from orchard import Image, SandboxClient

image = typer.Typer(help="Root file systems that sandboxes of this machine can start from.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="Name of the image, such as python:3.13.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@image.command("import")
def import_image(
    name: _Name,
    path: Annotated[
        Path,
        typer.Argument(help="A `docker save` archive, OCI layout, root tar or folder on this machine.", exists=True),
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Replace an image of this name.")] = False,
    as_json: _Json = False,
) -> None:
    """Import an image from an archive or a folder."""
    with _client() as client:
        found = _import(client, name, str(path.absolute()), replace=replace, quiet=as_json)
    if found is None:
        _fail("the import ended without an image")
    print(json.dumps(_as_json(found)) if as_json else f"{found.name}  {_size(found.size)}")  # noqa: T201


def _import(client: SandboxClient, name: str, path: str, *, replace: bool, quiet: bool) -> Image | None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    found = None
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bars:
        bar = bars.add_task(name, total=None)
        for progress in client.images.import_image(name, path, replace=replace):
            bars.update(bar, completed=progress.done_bytes, total=progress.total_bytes or None)
            found = progress.image or found
    return found


@image.command("list")
def list_images(as_json: _Json = False) -> None:
    """List the imported images."""
    with _client() as client:
        images = list(client.images.list())
    if as_json:
        print(json.dumps([_as_json(found) for found in images]))  # noqa: T201
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("NAME", "SIZE", "IMPORTED", "DIGEST", box=None, pad_edge=False)
    for found in images:
        time = found.import_time
        imported = time.astimezone().isoformat(sep=" ", timespec="seconds") if time else ""
        table.add_row(found.name, _size(found.size), imported, found.digest[:12])
    Console().print(table)


@image.command("rm")
def remove_image(name: _Name, as_json: _Json = False) -> None:
    """Remove an image that no sandbox uses."""
    with _client() as client:
        client.images.remove(name)
    if as_json:
        print(json.dumps({"removed": name}))  # noqa: T201


@contextmanager
def _client() -> Iterator[SandboxClient]:
    """A client whose errors end the command with a sentence."""
    from orchard import InvalidArgument, OrchardError, SandboxClient

    try:
        with SandboxClient() as client:
            yield client
    except InvalidArgument as error:  # what was typed
        _fail(str(error), code=2)
    except OrchardError as error:
        _fail(str(error))


def _as_json(found: Image) -> dict[str, object]:
    imported = found.import_time.isoformat().replace("+00:00", "Z") if found.import_time else None
    return {"name": found.name, "digest": found.digest, "size": found.size, "import_time": imported}


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _fail(message: str, *, code: int = 1) -> NoReturn:
    print(f"orchard: {message}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(code)
