"""Usage of sandboxes."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "sandbox_usage",
        sa.Column("uid", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("sandbox_id", sa.Text, nullable=False),
        sa.Column("labels", JSONB, nullable=False),
        sa.Column("cpu", sa.Double, nullable=False),
        sa.Column("memory_bytes", sa.BigInteger, nullable=False),
        sa.Column("ready_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("end_time", sa.DateTime(timezone=True)),
        schema="gateway",
    )
    op.create_index("sandbox_usage_period", "sandbox_usage", ["tenant", "ready_time"], schema="gateway")
    op.create_index(
        "sandbox_usage_open", "sandbox_usage", ["uid"], schema="gateway", postgresql_where=sa.text("end_time IS NULL")
    )


def downgrade() -> None:
    op.drop_table("sandbox_usage", schema="gateway")
