"""Commands that `orchard` finds through the entry-point group `orchard.commands`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.local.images import image

__all__ = ["demo", "image", "up", "with_platform"]


def up(  # noqa: PLR0917 (options of the command line)
    data_dir: Annotated[
        Path | None,
        # Checked later, with better words.
        typer.Option(
            help="Where everything is kept. Default: $ORCHARD_DATA_DIR, else ~/.local/share/orchard.", readable=False
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="Port of the endpoint on 127.0.0.1; 0 takes a free one. Default: 7411.", min=0, max=65535),
    ] = None,
    listen: Annotated[str | None, typer.Option(help="host:port of the endpoint, instead of --port.")] = None,
    runtime: Annotated[
        Literal["process", "docker"] | None,
        typer.Option(
            help="What sandboxes are: processes in namespaces of their own, or containers of the Docker engine that "
            "DOCKER_HOST names. Default: $ORCHARD_RUNTIME, else process."
        ),
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="How log lines look.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="Least level of the services' lines.")
    ] = "info",
    ready_fd: Annotated[
        int | None, typer.Option(help="Write a line of JSON there when all is up.", hidden=True)
    ] = None,
    lifeline_fd: Annotated[
        int | None, typer.Option(help="Stop when this pipe's other end closes.", hidden=True)
    ] = None,
) -> None:
    """Run the whole platform on this machine, in the foreground, until Ctrl-C.

    DATABASE_URL and REDIS_URL name servers of your own to use instead of the embedded ones.
    """
    import os

    from orchard._client.profile import profile_path

    from services.local.supervisor.listen import DEFAULT_LISTEN
    from services.local.supervisor.platform import PlatformOptions
    from services.local.supervisor.run import run_platform

    if port is not None and listen is not None:
        raise typer.BadParameter("give --port or --listen, not both", param_hint="--port")
    address = listen or (DEFAULT_LISTEN if port is None else f"127.0.0.1:{port}")
    options = PlatformOptions(
        data_directory=data_dir,
        listen=address,
        profile=profile_path(os.environ),
        subreaper=True,
        log_format=log_format,
        log_level=log_level,
        environment={**os.environ, **({"ORCHARD_RUNTIME": runtime} if runtime else {})},
    )
    raise typer.Exit(run_platform(options, ready_fd=ready_fd, lifeline_fd=lifeline_fd))


def demo(
    only: Annotated[
        list[str] | None, typer.Argument(help="Ids of the tasks to take, for instance orchard-demo__intervals-3.")
    ] = None,
    tasks: Annotated[
        Path | None, typer.Option(help="Folder of the tasks. Default: examples/tasks.", file_okay=False, exists=True)
    ] = None,
    running: Annotated[
        bool, typer.Option("--running", help="Use the platform that runs already instead of one of its own.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the data sets. Default: build/demo.", file_okay=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Evaluate candidate patches on software-engineering tasks, each in its own sandbox, all in parallel.

    Each run is kept as a trajectory with its reward, those of a task as a group, and both are exported. Ends with a
    table of verdicts, and with exit code 1 if one of them is not the expected one.
    """
    from services.local.demo.run import DEFAULT_OUTPUT, DEFAULT_TASKS, DemoOptions, run

    options = DemoOptions(
        tasks=tasks or DEFAULT_TASKS,
        only=frozenset(only or ()),
        running=running,
        as_json=as_json,
        output=output or DEFAULT_OUTPUT,
    )
    raise typer.Exit(run(options))


def with_platform(
    command: Annotated[list[str], typer.Argument(help="A program with arguments, after --.", metavar="COMMAND...")],
) -> None:
    """Run a program against a platform of its own, which is gone with its data when the program ends.

    For tests, examples and CI: `orchard with-platform -- pytest tests`. The program finds the platform by itself, by
    ORCHARD_ENDPOINT and ORCHARD_API_KEY; its exit code is the command's.
    """
    from services.local.demo.with_platform import run

    raise typer.Exit(run(command))
