"""`python -m services.judge [migrate]`: settings come from the environment (settings.py)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.common.db import migrate
from services.common.migrating import add_migrate
from services.common.process import run_service
from services.common.settings import DatabaseSettings
from services.judge.app import run
from services.judge.settings import JudgeServiceSettings
from services.judge.store.tables import SCHEMA

MIGRATIONS = Path(__file__).parent / "migrations"


def main() -> int:
    """Serve, or bring the database up to date."""
    parser = argparse.ArgumentParser(prog="python -m services.judge", description="The judge service of Orchard.")
    commands = parser.add_subparsers(dest="command")
    add_migrate(commands, "judge")
    arguments = parser.parse_args()
    if arguments.command is None:
        return run_service("judge", JudgeServiceSettings, run)
    database = DatabaseSettings()  # type: ignore[call-arg]
    url = database.database_url.get_secret_value()
    tls = database.database_tls()
    migrate(url, schema=SCHEMA, migrations=MIGRATIONS, tls=tls, wait_seconds=arguments.wait)
    return 0


if __name__ == "__main__":
    sys.exit(main())
