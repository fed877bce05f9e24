"""Scopes of API keys."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import ARRAY

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.add_column(
        "api_keys", sa.Column("scopes", ARRAY(sa.Text), nullable=False, server_default="{}"), schema="gateway"
    )


def downgrade() -> None:
    # Before, any valid key could do what the role user may: a key of single scopes must not become one of those.
    op.execute(
        "UPDATE gateway.api_keys SET revoke_time = coalesce(revoke_time, now()) WHERE NOT roles && '{user,admin}'"
    )
    op.drop_column("api_keys", "scopes", schema="gateway")
