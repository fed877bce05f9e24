"""`python -m services.local.migrate`: every schema up to date, in one process, since each costs its imports."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

SERVICES: Final = ("gateway", "trajectories", "judge")
"""Those with a schema, which has their name."""


def migrations_of(service: str) -> Path:
    """The folder of its Alembic history, without importing the service."""
    spec = find_spec(f"services.{service}")
    return Path(next(iter(spec.submodule_search_locations or ())) if spec else "", "migrations")


def main() -> int:
    """Migrate; settings come from the environment."""
    from services.common.db import migrate
    from services.common.settings import DatabaseSettings
    from services.common.tls import TlsError

    database = DatabaseSettings()  # type: ignore[call-arg]
    url = database.database_url.get_secret_value()
    try:
        for service in SERVICES:
            migrate(url, schema=service, migrations=migrations_of(service), tls=database.database_tls())
    except TlsError as error:
        print(f"orchard migrate: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
