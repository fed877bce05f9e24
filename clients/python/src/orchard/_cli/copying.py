"""orchard cp."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from orchard._cli.output import Json, client, complete_sandbox, print_json, transfer

_REMOTE: Final = re.compile(r"([a-z][a-z0-9-]*):(.*)\Z", re.DOTALL)


def parse_place(text: str) -> tuple[str, str]:
    """(sandbox id, path); the id is empty for a local path. A local path that looks like a sandbox's is written
    ./like:this.
    """
    match = _REMOTE.match(text)
    return (match[1], match[2]) if match else ("", text)


def _complete(incomplete: str) -> list[str]:
    return [f"{name}:" for name, _help in complete_sandbox(incomplete)]


def copy(
    source: Annotated[str, typer.Argument(help="A local path, or SANDBOX:PATH.", autocompletion=_complete)],
    target: Annotated[str, typer.Argument(help="A local path, or SANDBOX:PATH.", autocompletion=_complete)],
    exclude: Annotated[
        list[str] | None, typer.Option(help="Shell pattern of names to leave out of an upload. Can be repeated.")
    ] = None,
    unsafe_links: Annotated[
        Literal["error", "skip"], typer.Option(help="What to do with downloaded links that point outside.")
    ] = "error",
    json: Json = False,
) -> None:
    """Copy a file or folder into a sandbox or out of it. A folder's contents go below the target and merge with what
    is there; sockets, pipes and devices in it are left out.
    """
    source_id, source_path = parse_place(source)
    target_id, target_path = parse_place(target)
    if bool(source_id) == bool(target_id):
        raise typer.BadParameter("one of the two must be SANDBOX:PATH, the other local", param_hint="SOURCE TARGET")
    if "-" in {source, target}:
        instead = "-i SANDBOX 'cat > PATH'" if source == "-" else "SANDBOX cat PATH"
        raise typer.BadParameter(
            f"'-' is no file: write `orchard exec {instead}`, or give ./- for a file of that name",
            param_hint="SOURCE TARGET",
        )
    if target_id and not Path(source_path).exists():
        raise typer.BadParameter(f"there is no file {source_path!r} here", param_hint="SOURCE")
    with client() as api, transfer(f"{source} -> {target}", quiet=json) as progress:
        if target_id:
            # Without a path it goes to the home: a folder's contents do, and a file under its own name.
            below_home = Path(source_path).name if Path(source_path).is_file() else "."
            api.attach(target_id).upload(
                source_path, target_path or below_home, exclude=exclude or (), progress=progress
            )
        else:
            sandbox = api.attach(source_id)
            sandbox.download(source_path or ".", target_path, progress=progress, unsafe_links=unsafe_links)
    if json:
        print_json({"source": source, "target": target})
