"""The audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("entry_id", sa.Uuid, primary_key=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("method", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("client_address", sa.Text, nullable=False),
        schema="gateway",
    )
    op.create_index("audit_newest", "audit", ["time", "entry_id"], schema="gateway")
    op.create_index("audit_of_tenant", "audit", ["tenant", "time", "entry_id"], schema="gateway")
    op.create_index("audit_of_target", "audit", ["target", "time", "entry_id"], schema="gateway")


def downgrade() -> None:
    op.drop_table("audit", schema="gateway")
