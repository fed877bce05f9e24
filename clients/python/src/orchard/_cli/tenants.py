"""Tenants and their quotas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from orchard._cli.output import Json, age, client, print_json, seconds, show, size, table

_UNLIMITED = "unlimited"

tenants = typer.Typer(
    help="Tenants and what they may have; needs the role admin or the scope tenants.", no_args_is_help=True
)


@tenants.command("set")
def set_tenant(  # noqa: PLR0917 (options of the command line)
    tenant: Annotated[str, typer.Argument(help="Whose quota.")],
    sandboxes: Annotated[str | None, typer.Option(help="How many there may be at once; more wait.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Virtual CPUs together.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory together, like 512GiB.")] = None,
    create_rate: Annotated[str | None, typer.Option(help="How many leave the queue each second.")] = None,
    lifetime: Annotated[str | None, typer.Option(help="How long each may live at most, like 7d.")] = None,
    json: Json = False,
) -> None:
    """Change what a tenant may have. What is not given stays; "unlimited" lifts a bound."""
    given = {
        "sandboxes": _bound("--sandboxes", sandboxes, int),
        "cpu": _bound("--cpu", cpu, float),
        "memory": _bound("--memory", memory, str),
        "creates_per_second": _bound("--create-rate", create_rate, float),
        "maximum_lifetime": _bound("--lifetime", lifetime, lambda text: seconds("--lifetime", text)),
    }
    if all(value is None for value in given.values()):
        raise typer.BadParameter("give at least one bound, or 'unlimited' for one", param_hint="OPTIONS")
    with client() as api:
        now = next((one.quota for one in api.tenants.list(tenant=tenant)), None)
        wanted: dict[str, Any] = {}
        for name, value in given.items():
            kept = getattr(now, "memory_bytes" if name == "memory" else name, None)
            wanted[name] = kept if value is None else None if value == _UNLIMITED else value
        made = api.tenants.set(tenant, **wanted)
    if json:
        print_json(made)
    else:
        _show([made])


@tenants.command("list")
def list_tenants(
    tenant: Annotated[str, typer.Option(help="Only this one.")] = "",
    json: Json = False,
) -> None:
    """List tenants that have a quota or a key."""
    with client() as api:
        found = list(api.tenants.list(tenant=tenant))
    if json:
        print_json(found)
    else:
        _show(found)


def _bound(option: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    """The value of an option: None where it is not given."""
    if text is None or text == _UNLIMITED:
        return text
    try:
        return parse(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor {_UNLIMITED!r}", param_hint=option) from None


def _show(found: list[Any]) -> None:
    def text(value: Any, form: Callable[[Any], str] = "{:g}".format) -> str:
        return _UNLIMITED if value is None else form(value)

    rows = [
        (
            one.tenant,
            text(one.quota.sandboxes, str),
            text(one.quota.cpu),
            text(one.quota.memory_bytes, size),
            text(one.quota.creates_per_second),
            text(one.quota.maximum_lifetime, _time),
            age(one.update_time) if one.update_time else "",
        )
        for one in found
    ]
    show(table(("TENANT", "SANDBOXES", "CPU", "MEMORY", "CREATES/S", "LIFETIME", "SET"), rows))


def _time(value: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if value >= length and value % length == 0:
            return f"{value / length:g}{unit}"
    return f"{value:g}s"
