"""Keys, usage and version."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import typer

from orchard._cli.output import Json, age, client, print_json, seconds, show, table

keys = typer.Typer(help="API keys; needs the role admin or the scope keys.", no_args_is_help=True)


@keys.command("create")
def create_key(  # noqa: PLR0917 (options of the command line)
    tenant: Annotated[str, typer.Option(help="Whom its bearer acts for.")] = "default",
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    role: Annotated[
        list[str] | None,
        typer.Option(help="user or admin. Can be repeated. Default: user, or none with --scope."),
    ] = None,
    scope: Annotated[
        list[str] | None,
        typer.Option(help="A single scope, like sandboxes:read, exec, files. Can be repeated."),
    ] = None,
    ttl: Annotated[str | None, typer.Option(help="How long it works, like 30d. Default: until revoked.")] = None,
    json: Json = False,
) -> None:
    """Make a key. It is shown this once."""
    with client() as api:
        made = api.keys.create(tenant, name=name, roles=role, scopes=scope or [], ttl=seconds("--ttl", ttl))
    if json:
        print_json({"key": made.key, "secret": made.secret})
    else:
        typer.echo(made.secret)
        typer.echo(f"key {made.key.key_id} of tenant {made.key.tenant}; it cannot be shown again", err=True)


@keys.command("list")
def list_keys(
    tenant: Annotated[str, typer.Option(help="Only this tenant's.")] = "",
    json: Json = False,
) -> None:
    """List keys, newest first."""
    with client() as api:
        found = list(api.keys.list(tenant=tenant))
    if json:
        print_json(found)
        return
    rows = [
        (
            key.key_id,
            key.tenant,
            key.name,
            " ".join((*key.roles, *key.scopes)),
            age(key.create_time),
            "revoked" if key.revoke_time else f"expires {key.expire_time:%Y-%m-%d %H:%M}" if key.expire_time else "",
        )
        for key in found
    ]
    show(table(("KEY", "TENANT", "NAME", "ROLES AND SCOPES", "AGE", ""), rows))


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(help="The key's public id.")], json: Json = False) -> None:
    """Stop a key within a few seconds."""
    with client() as api:
        key = api.keys.revoke(key_id)
    if json:
        print_json(key)
    else:
        typer.echo(key.key_id)


def usage(
    since: Annotated[str | None, typer.Option(help="Only the last 24h, 7d, ... Default: everything.")] = None,
    group_by: Annotated[str, typer.Option("--group-by", "-g", help="A label; one line for each of its values.")] = "",
    tenant: Annotated[str, typer.Option(help="Another tenant; needs the role admin.")] = "",
    json: Json = False,
) -> None:
    """Show what sandboxes used."""
    period = seconds("--since", since)
    start = None if period is None else dt.datetime.now(dt.UTC) - dt.timedelta(seconds=period)
    with client() as api:
        found = api.usage(start=start, group_by=group_by, tenant=tenant)
    if json:
        print_json(found)
        return
    rows = [
        (
            row.tenant,
            row.label_value,
            str(row.sandboxes),
            f"{row.sandbox_seconds:,.0f}",
            f"{row.cpu_hours:,.2f}",
            f"{row.memory_gib_hours:,.2f}",
        )
        for row in found
    ]
    show(table(("TENANT", group_by.upper() or "", "SANDBOXES", "SECONDS", "CPU HOURS", "GIB HOURS"), rows))


def version(json: Json = False) -> None:
    """Show the version of this client and of the platform that it talks to."""
    from importlib.metadata import version as installed

    own = installed("orchard-platform")
    with client() as api:
        platform, endpoint = api.version(), api.endpoint
    if json:
        print_json({"client": own, "endpoint": endpoint, "platform": platform})
        return
    typer.echo(f"client {own}")
    typer.echo(f"platform {platform.version} at {endpoint} (runtime {platform.runtime}, tenant {platform.tenant})")
