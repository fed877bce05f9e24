"""Requests by id; items of batches are told by what was asked, and those that an outage left out are judged again."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_SCHEMA = "judge"


def upgrade() -> None:
    text, flag = sa.Text(), sa.Boolean()
    op.create_table(
        "requests",
        sa.Column("tenant", text, primary_key=True),
        sa.Column("request_id", text, primary_key=True),
        sa.Column("asked", text, nullable=False),
        sa.Column("verdict_id", text, nullable=False),
        sa.Column("cached", flag, nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        schema=_SCHEMA,
    )
    # What was asked for items that are there already is not known in the caller's words: empty, which fits everything.
    op.add_column("batch_items", sa.Column("asked", text, nullable=False, server_default=""), schema=_SCHEMA)
    op.add_column("batch_items", sa.Column("again", flag, nullable=False, server_default=sa.false()), schema=_SCHEMA)
    op.drop_column("batch_items", "question_key", schema=_SCHEMA)


def downgrade() -> None:
    op.add_column(
        "batch_items", sa.Column("question_key", sa.Text(), nullable=False, server_default=""), schema=_SCHEMA
    )
    op.drop_column("batch_items", "again", schema=_SCHEMA)
    op.drop_column("batch_items", "asked", schema=_SCHEMA)
    op.drop_table("requests", schema=_SCHEMA)
