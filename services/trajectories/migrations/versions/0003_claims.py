"""The request by which a sample was claimed, so that a repeat finds it."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_SCHEMA = "trajectories"


def upgrade() -> None:
    for name in ("claim_id", "claim_hash"):
        op.add_column("samples", sa.Column(name, sa.Text, nullable=False, server_default=""), schema=_SCHEMA)
    op.create_index(
        "samples_claim", "samples", ["claim_id"], schema=_SCHEMA, postgresql_where=sa.text("claim_id <> ''")
    )


def downgrade() -> None:
    op.drop_index("samples_claim", "samples", schema=_SCHEMA)
    for name in ("claim_id", "claim_hash"):
        op.drop_column("samples", name, schema=_SCHEMA)
