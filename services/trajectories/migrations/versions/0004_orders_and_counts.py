"""Lists by outcome and counts follow an index."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_SCHEMA = "trajectories"


def upgrade() -> None:
    # An expression in it kept PostgreSQL from reading it in its order.
    op.drop_index("trajectories_outcome", "trajectories", schema=_SCHEMA)
    op.create_index("trajectories_outcome", "trajectories", ["tenant", "outcome_value", "key"], schema=_SCHEMA)
    # All that counts are made of, so that they read no row.
    op.create_index(
        "trajectories_counts",
        "trajectories",
        ["tenant", "dataset", "instance_id"],
        schema=_SCHEMA,
        postgresql_include=[
            *("repo", "website", "harness", "model", "policy_version", "status", "outcome_state", "outcome_value"),
            *("turns", "prompt_tokens", "completion_tokens", "cost_usd"),
        ],
    )


def downgrade() -> None:
    op.drop_index("trajectories_counts", "trajectories", schema=_SCHEMA)
    op.drop_index("trajectories_outcome", "trajectories", schema=_SCHEMA)
    op.create_index(
        "trajectories_outcome",
        "trajectories",
        ["tenant", sa.text("(outcome_value IS NULL)"), "outcome_value", "key"],
        schema=_SCHEMA,
    )
