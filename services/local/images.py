"""`orchard image`: the root file systems that sandboxes of this machine can start from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from services.local.images_client import Image, ImagesClient

image = typer.Typer(help="Root file systems that sandboxes of this machine can start from.", no_args_is_help=True)

_Name = Annotated[str, typer.Argument(help="Name of the image, such as python:3.13.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@image.command("import")
def import_image(
    name: _Name,
    path: Annotated[
        Path, typer.Argument(help="A `docker save` archive, OCI layout, root tar or folder on this machine.")
    ],
    replace: Annotated[bool, typer.Option("--replace", help="Replace an image of this name.")] = False,
    as_json: _Json = False,
) -> None:
    """Import an image from an archive or a folder."""
    from services.local.images_client import ImageError

    with _client() as client:
        try:
            found = _import(client, name, str(path.absolute()), replace=replace, quiet=as_json)
        except ImageError as error:
            _fail(str(error))
    if found is None:
        _fail("the import ended without an image")
    print(json.dumps(found.as_json()) if as_json else f"{found.name}  {_size(found.size)}")  # noqa: T201


def _import(client: ImagesClient, name: str, path: str, *, replace: bool, quiet: bool) -> Image | None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    found = None
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bars:
        bar = bars.add_task(name, total=None)
        for progress in client.import_image(name, path, replace=replace):
            bars.update(bar, completed=progress.done, total=progress.total or None)
            found = progress.image or found
    return found


@image.command("list")
def list_images(as_json: _Json = False) -> None:
    """List the imported images."""
    from services.local.images_client import ImageError

    with _client() as client:
        try:
            images = client.list_images()
        except ImageError as error:
            _fail(str(error))
    if as_json:
        print(json.dumps([found.as_json() for found in images]))  # noqa: T201
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("NAME", "SIZE", "IMPORTED", "DIGEST", box=None, pad_edge=False)
    for found in images:
        imported = found.import_time.astimezone().isoformat(sep=" ", timespec="seconds")
        table.add_row(found.name, _size(found.size), imported, found.digest[:12])
    Console().print(table)


@image.command("rm")
def remove_image(name: _Name, as_json: _Json = False) -> None:
    """Remove an image that no sandbox uses."""
    from services.local.images_client import ImageError

    with _client() as client:
        try:
            client.remove_image(name)
        except ImageError as error:
            _fail(str(error))
    if as_json:
        print(json.dumps({"removed": name}))  # noqa: T201


def _client() -> ImagesClient:
    from services.local.images_client import ImagesClient
    from services.local.supervisor.errors import PlatformError
    from services.local.supervisor.profile import find_profile

    try:
        return ImagesClient(find_profile(os.environ))
    except PlatformError as error:
        _fail(str(error))


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _fail(message: str) -> NoReturn:
    print(f"orchard: {message}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(1)
