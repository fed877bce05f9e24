"""Rubrics, verdicts, answers, batches and usage."""

from typing import Any

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

_SCHEMA = "judge"
_TIME = sa.DateTime(timezone=True)
_COUNTS = ("calls", "failed_calls", "prompt_tokens", "completion_tokens", "cached_tokens")


def _key(name: str, kind: Any) -> Any:
    return sa.Column(name, kind, primary_key=True)


def _given(name: str, kind: Any) -> Any:
    return sa.Column(name, kind, nullable=False)


def _usage() -> list[Any]:
    return [*(_given(name, sa.BigInteger()) for name in _COUNTS), _given("cost_usd", sa.Double())]


def upgrade() -> None:
    text, integer, flag = sa.Text(), sa.Integer(), sa.Boolean()
    op.create_table(
        "rubrics",
        *(_key("tenant", text), _key("name", text), _key("version", integer)),
        *(_given("body", JSONB()), _given("hash", text), _given("used", flag), _given("create_time", _TIME)),
        schema=_SCHEMA,
    )
    op.create_table(
        "verdicts",
        *(_key("tenant", text), _key("verdict_id", text), _given("question_key", text)),
        *(_given("state", sa.SmallInteger()), sa.Column("value", sa.Double())),
        *(_given("body", JSONB()), _given("create_time", _TIME)),
        schema=_SCHEMA,
    )
    # Found by question only where there is a number.
    op.create_index(
        "verdicts_question",
        "verdicts",
        ["tenant", "question_key", "create_time"],
        schema=_SCHEMA,
        postgresql_where=sa.text("state = 1"),
    )
    op.create_table(
        "answers",
        *(_key("tenant", text), _key("run", text), _key("judge", text), _key("vote", integer)),
        *(_key("swapped", flag), _key("attempt", integer)),
        *(_given(name, text) for name in ("ticket", "sha256", "finish", "words", "model")),
        *_usage(),
        _given("latency_seconds", sa.Double()),
        schema=_SCHEMA,
    )
    op.create_table(
        "batches",
        *(_key("tenant", text), _key("batch_id", text)),
        *_usage(),
        *(_given("budget_exhausted", flag), _given("create_time", _TIME)),
        schema=_SCHEMA,
    )
    op.create_table(
        "batch_items",
        *(_key("tenant", text), _key("batch_id", text), _key("item_id", text)),
        *(_given("question_key", text), _given("verdict_id", text), _given("cached", flag)),
        schema=_SCHEMA,
    )
    op.create_table(
        "usage",
        *(_key("tenant", text), _key("day", sa.Date()), _key("judge", text), _key("model", text)),
        _key("rubric", text),
        *_usage(),
        schema=_SCHEMA,
    )


def downgrade() -> None:
    for table in ("usage", "batch_items", "batches", "answers", "verdicts", "rubrics"):
        op.drop_table(table, schema=_SCHEMA)
