"""orchard forward, orchard expose."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Final

import typer

from orchard._cli.output import Json, SandboxId, client, describe, fail, print_json, seconds, size

if TYPE_CHECKING:
    from orchard import Address, ForwardEvent, Sandbox, SandboxInfo

_PORTS: Final = re.compile(r"(?:(?P<local>\d*):)?(?P<remote>\d+)\Z")
_ENDPOINT: Final = re.compile(r"(?P<name>[^:]+)(?::(?P<port>\d+))?\Z")


def forward(  # noqa: PLR0917 (options of the command line)
    sandbox: SandboxId,
    ports: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOCAL:]PORT...",
            help='8080:80 is port 80 of the sandbox at 8080 here, ":80" at a free port, 80 at 80.',
        ),
    ],
    bind: Annotated[
        str, typer.Option("--bind", help="Address to listen on here. Anyone who reaches it reaches the server.")
    ] = "127.0.0.1",
    host: Annotated[
        str, typer.Option("--host", help="Address inside that the server listens on. Default: loopback.")
    ] = "",
    wait: Annotated[
        str, typer.Option("--wait", help="How long a connection waits for a server that does not listen yet.")
    ] = "0s",
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Tell of each connection, on stderr.")] = False,
    json: Json = False,
) -> None:
    """Make TCP ports of a sandbox ports of this machine, until Ctrl-C. Works without a network in the sandbox.

    Prints a line for each: where it listens, and the port inside. A connection is refused while nothing listens inside.
    """
    wanted = [_ports(text) for text in ports]
    patience = seconds("--wait", wait) or 0.0
    teller = _Teller(verbose=verbose)
    with client() as api, ExitStack() as stack:
        found = api.get(sandbox)
        _check_lives(found.info)
        options = {"bind": bind, "host": host}
        opened: list[tuple[Address, int]] = []
        for local, remote in wanted:
            made = found.forward(remote, local_port=local, wait=patience, on_event=teller.told, **options)
            opened.append((stack.enter_context(made), remote))
        if json:
            print_json([{"host": one.host, "port": one.port, "sandbox_port": remote} for one, remote in opened])
        else:
            for one, remote in opened:
                typer.echo(f"{one} -> {remote}")
        sys.stdout.flush()
        _until_it_ends(found)


def expose(
    sandbox: SandboxId,
    endpoints: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME[:PORT]...",
            help="llm:8000 is the platform's endpoint llm at port 8000 inside, llm at a free port.",
        ),
    ],
    json: Json = False,
) -> None:
    """Make endpoints of the platform ports on 127.0.0.1 inside a sandbox, until Ctrl-C. Works without a network in it.

    Prints a line for each: its name, and where it listens inside. Which there are is the operator's choice.
    """
    wanted = [_endpoint(text) for text in endpoints]
    with client() as api, ExitStack() as stack:
        found = api.get(sandbox)
        _check_lives(found.info)
        opened = [(name, stack.enter_context(found.expose(name, port))) for name, port in wanted]
        if json:
            print_json([{"endpoint": name, "host": one.host, "port": one.port} for name, one in opened])
        else:
            for name, one in opened:
                typer.echo(f"{name} -> {one}")
        sys.stdout.flush()
        _until_it_ends(found)


class _Teller:
    """Says on stderr what happens to connections."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._told: set[str] = set()

    def told(self, event: ForwardEvent) -> None:
        error = event.error
        if not self._verbose:
            # Once for each kind: a browser makes many, and all that it sees is a reset.
            if error is None or error.reason == "CONNECTION_RESET" or error.reason in self._told:
                return
            self._told.add(error.reason)
        line = f"connection {event.number} to {event.port}: {event.state}"
        if event.sent or event.received:
            line += f", {size(event.sent)} in, {size(event.received)} out"
        typer.echo(f"{line}: {describe(error)}" if error is not None else line, err=True)


def _until_it_ends(sandbox: Sandbox) -> None:
    from orchard import SandboxLost, Unavailable

    while True:
        try:
            info = sandbox.wait_ended()
        except Unavailable as error:
            # Connections are possible again as soon as the platform is back.
            typer.echo(f"orchard: {describe(error)}; still trying", err=True)
            continue
        why = f" ({info.message or info.reason})" if info.message or info.reason else ""
        fail(SandboxLost(f"sandbox {info.sandbox_id} has ended{why}"), code=1)


def _check_lives(info: SandboxInfo) -> None:
    from orchard import SandboxLost

    if info.state.is_final:
        raise SandboxLost(f"sandbox {info.sandbox_id} has ended ({info.message or info.reason or info.state})")


def _ports(text: str) -> tuple[int, int]:
    """The local and the remote port of an argument."""
    match = _PORTS.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no [LOCAL:]PORT, like 8080:80, :80 or 80", param_hint="PORT")
    local = match["remote"] if match["local"] is None else match["local"] or "0"
    return _port(local, 0), _port(match["remote"], 1)


def _endpoint(text: str) -> tuple[str, int]:
    match = _ENDPOINT.match(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no NAME[:PORT], like llm or llm:8000", param_hint="NAME")
    return match["name"], _port(match["port"] or "0", 0)


def _port(text: str, minimum: int) -> int:
    if not minimum <= int(text) <= 65_535:
        raise typer.BadParameter(f"{text} is no port; it must be from {minimum} to 65535", param_hint="PORT")
    return int(text)
