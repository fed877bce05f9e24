"""`python -m services.gateway [migrate | create-key ...]`: settings come from the environment (settings.py)."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import uuid
from pathlib import Path

from services.common.db import connect, migrate
from services.common.health import Health
from services.common.migrating import add_migrate
from services.common.process import run_service
from services.common.settings import DatabaseSettings
from services.common.tls import TlsError
from services.common.validation import Fields
from services.gateway.app import run
from services.gateway.audit import Entry
from services.gateway.keys import Keys
from services.gateway.settings import GatewaySettings
from services.gateway.store import SCHEMA, GatewayStore
from services.gateway.store_audit import AuditTable

MIGRATIONS = Path(__file__).parent / "migrations"


async def _create_key(database: DatabaseSettings, tenant: str, name: str, roles: list[str]) -> None:
    fields = Fields()
    fields.tenant("tenant", tenant)
    fields.done()
    engine = connect(database.database_url.get_secret_value(), tls=database.database_tls())
    store = GatewayStore(engine)
    try:
        key, secret = await Keys(store, Health()).create(tenant, name, frozenset(roles), None)
        done = ("orchard.admin.v1.KeyService/CreateKey", key.key_id, "", "OK", "create-key")
        await AuditTable(engine).add([Entry(uuid.uuid4(), key.create_time, tenant, "", *done)])
        print(json.dumps({"key_id": key.key_id, "secret": secret}))  # noqa: T201 (its only output)
    finally:
        await store.close()


def main() -> int:
    """Serve, or do one of the operator's tasks."""
    parser = argparse.ArgumentParser(prog="python -m services.gateway", description="The gateway of Orchard.")
    commands = parser.add_subparsers(dest="command")
    add_migrate(commands, "gateway")
    create = commands.add_parser("create-key", help="make an API key and print it, this once, as JSON")
    create.add_argument("--tenant", required=True)
    create.add_argument("--name", default="")
    create.add_argument("--role", action="append", choices=["user", "admin"], required=True)
    arguments = parser.parse_args()
    if arguments.command is None:
        return run_service("gateway", GatewaySettings, run)
    database = DatabaseSettings()  # type: ignore[call-arg]
    try:
        if arguments.command == "migrate":
            url = database.database_url.get_secret_value()
            tls, wait = database.database_tls(), arguments.wait
            migrate(url, schema=SCHEMA, migrations=MIGRATIONS, tls=tls, wait_seconds=wait)
        else:
            asyncio.run(_create_key(database, arguments.tenant, arguments.name, arguments.role))
    except TlsError as error:
        print(f"orchard gateway: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
