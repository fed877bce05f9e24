"""The tables of schema `judge`, as the migrations make them."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

SCHEMA: Final = "judge"
_metadata: Final = sa.MetaData(schema=SCHEMA)
_TIME: Final = sa.DateTime(timezone=True)
COUNTS: Final = ("calls", "failed_calls", "prompt_tokens", "completion_tokens", "cached_tokens")


def _usage_columns() -> tuple[sa.Column[int] | sa.Column[float], ...]:
    return (*(sa.Column(name, sa.BigInteger) for name in COUNTS), sa.Column("cost_usd", sa.Double))


RUBRICS: Final = sa.Table(
    "rubrics",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("version", sa.Integer, primary_key=True),
    sa.Column("body", JSONB),
    sa.Column("hash", sa.Text),
    sa.Column("used", sa.Boolean),
    sa.Column("create_time", _TIME),
)

VERDICTS: Final = sa.Table(
    "verdicts",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("verdict_id", sa.Text, primary_key=True),
    sa.Column("question_key", sa.Text),
    sa.Column("state", sa.SmallInteger),
    sa.Column("value", sa.Double),
    sa.Column("body", JSONB),
    sa.Column("create_time", _TIME),
)

ANSWERS: Final = sa.Table(
    "answers",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("run", sa.Text, primary_key=True),
    sa.Column("judge", sa.Text, primary_key=True),
    sa.Column("vote", sa.Integer, primary_key=True),
    sa.Column("swapped", sa.Boolean, primary_key=True),
    sa.Column("attempt", sa.Integer, primary_key=True),
    sa.Column("ticket", sa.Text),
    sa.Column("sha256", sa.Text),
    sa.Column("finish", sa.Text),
    sa.Column("words", sa.Text),
    sa.Column("model", sa.Text),
    *_usage_columns(),
    sa.Column("latency_seconds", sa.Double),
)

BATCHES: Final = sa.Table(
    "batches",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("batch_id", sa.Text, primary_key=True),
    *_usage_columns(),
    sa.Column("budget_exhausted", sa.Boolean),
    sa.Column("create_time", _TIME),
)

BATCH_ITEMS: Final = sa.Table(
    "batch_items",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("item_id", sa.Text, primary_key=True),
    sa.Column("asked", sa.Text),
    sa.Column("verdict_id", sa.Text),
    sa.Column("cached", sa.Boolean),
    sa.Column("again", sa.Boolean),
)

REQUESTS: Final = sa.Table(
    "requests",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("request_id", sa.Text, primary_key=True),
    sa.Column("asked", sa.Text),
    sa.Column("verdict_id", sa.Text),
    sa.Column("cached", sa.Boolean),
    sa.Column("create_time", _TIME),
)

WAITING_TEXTS: Final = sa.Table(
    "waiting_texts",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("text", sa.Text),
)

USAGE: Final = sa.Table(
    "usage",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("day", sa.Date, primary_key=True),
    sa.Column("judge", sa.Text, primary_key=True),
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("rubric", sa.Text, primary_key=True),
    *_usage_columns(),
)
