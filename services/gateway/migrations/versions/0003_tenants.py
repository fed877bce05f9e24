"""Quotas of tenants."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("sandboxes", sa.BigInteger),
        sa.Column("cpu", sa.Double),
        sa.Column("memory_bytes", sa.BigInteger),
        sa.Column("creates_per_second", sa.Double),
        sa.Column("maximum_lifetime_ms", sa.BigInteger),
        sa.Column("update_time", sa.DateTime(timezone=True), nullable=False),
        schema="gateway",
    )


def downgrade() -> None:
    op.drop_table("tenants", schema="gateway")
