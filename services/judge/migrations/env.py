"""Alembic's entry."""

from services.common.db import run_migrations

run_migrations()
