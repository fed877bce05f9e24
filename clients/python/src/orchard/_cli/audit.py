"""The audit log."""

from __future__ import annotations

import datetime as dt
from itertools import islice
from typing import Annotated

import typer

from orchard._cli.output import Json, client, print_json, seconds, show, table


def audit(  # noqa: PLR0917 (options of the command line)
    tenant: Annotated[str, typer.Option(help="Only this tenant's. Another than one's own needs the role admin.")] = "",
    key: Annotated[str, typer.Option(help="Only calls with this key.")] = "",
    method: Annotated[str, typer.Option(help="Only this method, like DeleteSandbox.")] = "",
    target: Annotated[str, typer.Option(help="Only calls on this sandbox, key, tenant or image.")] = "",
    status: Annotated[str, typer.Option(help="Only calls with this status, like OK or PERMISSION_DENIED.")] = "",
    since: Annotated[str | None, typer.Option(help="Only the last 24h, 7d, ... Default: everything.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most so many.")] = 100,
    json: Json = False,
) -> None:
    """Show who changed what and what was refused, newest first."""
    period = seconds("--since", since)
    start = None if period is None else dt.datetime.now(dt.UTC) - dt.timedelta(seconds=period)
    with client() as api:
        entries = api.audit(
            tenant=tenant,
            key_id=key,
            method=method,
            target=target,
            status=status.upper(),
            start=start,
            page_size=min(limit, 1000),
        )
        found = list(islice(entries, limit))
    if json:
        print_json(found)
        return
    rows = [
        (
            f"{entry.time:%Y-%m-%d %H:%M:%S}",
            entry.tenant,
            entry.key_id,
            entry.method.rpartition("/")[2],
            entry.target,
            entry.status,
            entry.client_address,
        )
        for entry in found
    ]
    show(table(("TIME (UTC)", "TENANT", "KEY", "METHOD", "TARGET", "STATUS", "FROM"), rows))
