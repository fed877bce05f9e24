"""Sandboxes: create, list, get, rm, wait."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchard._cli.output import (
    Json,
    SandboxId,
    age,
    client,
    complete_sandbox,
    pairs,
    print_json,
    seconds,
    show,
    size,
    table,
    waiting,
)

if TYPE_CHECKING:
    from orchard import SandboxClient, SandboxInfo

Labels = Annotated[list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="Can be repeated.")]


def create(  # noqa: PLR0917 (options of the command line)
    image: Annotated[
        str | None, typer.Argument(help="What to start from. Default on one machine: the host's root.")
    ] = None,
    image_option: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="The same as IMAGE.")] = None,
    sandbox_id: Annotated[str | None, typer.Option("--id", help="Choose its id.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", "-e", metavar="KEY=VALUE", help="Can be repeated.")] = None,
    secret_env: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Environment that is stored nowhere.")
    ] = None,
    label: Labels = None,
    cpu: Annotated[float | None, typer.Option(help="Virtual CPUs.")] = None,
    memory: Annotated[str | None, typer.Option(help="Like 2GiB.")] = None,
    disk: Annotated[str | None, typer.Option(help="Like 10GiB.")] = None,
    shm: Annotated[str | None, typer.Option(help="Size of /dev/shm, like 1GiB.")] = None,
    network: Annotated[str | None, typer.Option(help="none, host, open, dns_only or allow:NAME.")] = None,
    ttl: Annotated[str | None, typer.Option(help="Time to live, like 90m. Default: 24h.")] = None,
    idle_timeout: Annotated[str | None, typer.Option(help="Delete it after this long without use.")] = None,
    workdir: Annotated[str | None, typer.Option("--workdir", "-w", help="Where commands run.")] = None,
    user: Annotated[str | None, typer.Option("--user", "-u", help="Who runs commands.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher leaves the queue first.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Return when it is ready.")] = True,
    timeout: Annotated[str, typer.Option(help="How long to wait.")] = "30m",
    json: Json = False,
) -> None:
    """Make a sandbox and print its id. It lives until it is removed or its time is over."""
    if image and image_option and image != image_option:
        raise typer.BadParameter(f"is {image_option!r}, and IMAGE is {image!r}: give one", param_hint="--image")
    options: dict[str, Any] = {
        "sandbox_id": sandbox_id,
        "env": pairs("--env", env),
        "secret_env": pairs("--secret-env", secret_env),
        "labels": pairs("--label", label),
        "cpu": cpu,
        "memory": memory,
        "disk": disk,
        "shm": shm,
        "network": network,
        "ttl": seconds("--ttl", ttl),
        "idle_timeout": seconds("--idle-timeout", idle_timeout),
        "working_directory": workdir,
        "user": user,
        "priority": priority,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with client() as api:
        with waiting("starting a sandbox", quiet=json):
            made = api.create(image or image_option, wait=wait, timeout=seconds("--timeout", timeout), **given)
        if json:
            print_json(made.info)
        else:
            typer.echo(made.sandbox_id)
        sys.stdout.flush()
        # Only now: one whose id nobody was told would be nobody's.
        made.detach()


def list_sandboxes(  # noqa: PLR0917 (options of the command line)
    label: Labels = None,
    state: Annotated[list[str] | None, typer.Option(help="Only these states. Can be repeated.")] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Also those that have ended.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing on a terminal, until Ctrl-C.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids alone.")] = False,
    json: Json = False,
) -> None:
    """List sandboxes, newest first."""
    labels = pairs("--label", label)
    if watch and (json or quiet):
        raise typer.BadParameter("cannot be combined with --json or --quiet", param_hint="--watch")
    if watch and not sys.stdout.isatty():
        # What is drawn anew comes out at the very end there, and nobody who reads it would be missed.
        raise typer.BadParameter("standard output is no terminal here; repeat `orchard list`", param_hint="--watch")
    with client() as api:

        def found() -> list[SandboxInfo]:
            return list(api.list(labels=labels, states=state or (), all=everything))

        if watch:
            _watch(found)
        elif json:
            print_json(found())
        elif quiet:
            for info in found():
                typer.echo(info.sandbox_id)
        else:
            show(_table(found()))


def _watch(found: Any) -> None:
    from rich.live import Live

    with Live(_table(found()), auto_refresh=False) as live:
        while True:
            time.sleep(1.0)
            live.update(_table(found()), refresh=True)


def _table(sandboxes: list[SandboxInfo]) -> Any:
    rows = [
        (
            info.sandbox_id,
            str(info.state),
            info.reason,
            info.image or "host",
            age(info.create_time),
            "" if info.state.is_final else age(info.expire_time),
            " ".join(f"{key}={value}" for key, value in sorted(info.labels.items())),
        )
        for info in sandboxes
    ]
    return table(("ID", "STATE", "REASON", "IMAGE", "AGE", "EXPIRES IN", "LABELS"), rows)


def get(sandbox: SandboxId, json: Json = False) -> None:
    """Show a sandbox."""
    with client() as api:
        info = api.get(sandbox).info
    if json:
        print_json(info)
        return
    rows = [
        ("id", info.sandbox_id),
        ("uid", info.uid),
        ("state", str(info.state)),
        ("reason", info.reason),
        ("message", info.message),
        ("image", info.image or "host"),
        ("labels", " ".join(f"{key}={value}" for key, value in sorted(info.labels.items()))),
        ("cpu", f"{info.cpu:g}" if info.cpu else "not limited"),
        ("memory", size(info.memory_bytes) if info.memory_bytes else "not limited"),
        ("network", info.network),
        ("working directory", info.working_directory),
        ("user", info.user),
        ("created", _moment(info.create_time)),
        ("ready", _moment(info.ready_time)),
        ("expires", _moment(info.expire_time)),
        ("ended", _moment(info.end_time)),
    ]
    show(table(("", ""), [row for row in rows if row[1]]))


def _moment(moment: Any) -> str:
    return moment.astimezone().isoformat(sep=" ", timespec="milliseconds") if moment else ""


def remove(
    sandboxes: Annotated[
        list[str] | None, typer.Argument(help="Ids.", metavar="SANDBOX...", autocompletion=complete_sandbox)
    ] = None,
    label: Labels = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Every living sandbox of the tenant.")] = False,
    json: Json = False,
) -> None:
    """End sandboxes and everything in them: by id, by label, or all."""
    labels = pairs("--label", label)
    if not (sandboxes or labels or everything):
        raise typer.BadParameter("name sandboxes, or give --label or --all", param_hint="SANDBOX")
    with client() as api:
        ids = list(sandboxes or ())
        if labels or everything:
            ids += [info.sandbox_id for info in api.list(labels=labels) if info.sandbox_id not in ids]
        failed = _remove_each(api, ids, quiet=json)
    if json:
        print_json({"removed": [name for name in ids if name not in failed], "failed": failed})
    if failed:
        raise typer.Exit(1)


def _remove_each(api: SandboxClient, ids: list[str], *, quiet: bool) -> dict[str, str]:
    from orchard import OrchardError
    from orchard._cli.output import describe

    failed: dict[str, str] = {}
    for name in ids:
        try:
            api.delete(name)
        except OrchardError as error:
            failed[name] = describe(error)
            typer.echo(f"orchard: {name}: {failed[name]}", err=True)
        else:
            if not quiet:
                typer.echo(name)
    return failed


def wait(
    sandbox: SandboxId,
    ended: Annotated[bool, typer.Option("--ended", help="Wait until it has ended, instead of ready.")] = False,
    timeout: Annotated[str | None, typer.Option(help="How long, like 10m. Default: no limit.")] = None,
    json: Json = False,
) -> None:
    """Wait until a sandbox is ready, and print its state. Fails if it ends instead."""
    limit = seconds("--timeout", timeout)
    with client() as api, waiting(f"waiting for {sandbox}", quiet=json):
        found = api.attach(sandbox)
        info = found.wait_ended(limit) if ended else found.wait_ready(limit)
    if json:
        print_json(info)
    else:
        typer.echo(f"{info.state} {info.reason}".strip())
