"""API keys."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary, nullable=False),
        sa.Column("roles", ARRAY(sa.Text), nullable=False),
        sa.Column("create_time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expire_time", sa.DateTime(timezone=True)),
        sa.Column("revoke_time", sa.DateTime(timezone=True)),
        schema="gateway",
    )
    op.create_index("api_keys_newest", "api_keys", ["create_time", "key_id"], schema="gateway")


def downgrade() -> None:
    op.drop_table("api_keys", schema="gateway")
