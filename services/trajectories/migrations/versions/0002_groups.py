"""Groups of attempts at a prompt."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_SCHEMA = "trajectories"
_TIME = sa.DateTime(timezone=True)
_TASK = ("dataset", "instance_id", "repo", "website", "split")


def upgrade() -> None:
    op.create_table(
        "groups",
        sa.Column("key", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in _TASK),
        *(sa.Column(name, sa.Integer, nullable=False) for name in ("group_size", "maximum", "stride", "started")),
        sa.Column("low", sa.Double, nullable=False),
        sa.Column("high", sa.Double, nullable=False),
        sa.Column("eager", sa.Boolean, nullable=False),
        sa.Column("need_positive", sa.Boolean, nullable=False),
        sa.Column("closed", sa.Boolean, nullable=False),
        sa.Column("short", sa.Boolean, nullable=False),
        sa.Column("fallback", sa.Boolean, nullable=False),
        sa.Column("keep", sa.Boolean, nullable=False),
        sa.Column("verdict_reason", sa.Text, nullable=False),
        sa.Column("create_time", _TIME, nullable=False),
        sa.Column("close_time", _TIME),
        sa.UniqueConstraint("tenant", "group_id", name="groups_id"),
        schema=_SCHEMA,
    )
    op.create_index("groups_created", "groups", ["tenant", "key"], schema=_SCHEMA)
    op.create_index("groups_open", "groups", ["tenant", "key"], schema=_SCHEMA, postgresql_where=sa.text("NOT closed"))
    op.create_table(
        "samples",
        sa.Column("group_key", sa.BigInteger, primary_key=True),
        sa.Column("index", sa.Integer, primary_key=True),
        sa.Column("cause", sa.Integer, nullable=False),
        sa.Column("worker", sa.Text, nullable=False),
        sa.Column("lease_time", _TIME),
        sa.Column("outcome", sa.SmallInteger),
        sa.Column("reward", sa.Double),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("trajectory_id", sa.Text, nullable=False),
        sa.Column("arrival", sa.Integer),
        sa.Column("place", sa.Integer),
        sa.Column("advantage", sa.Double),
        sa.Column("trainable", sa.Boolean),
        schema=_SCHEMA,
    )
    op.create_index(
        "samples_open", "samples", ["group_key", "index"], schema=_SCHEMA, postgresql_where=sa.text("outcome IS NULL")
    )


def downgrade() -> None:
    op.drop_table("samples", schema=_SCHEMA)
    op.drop_table("groups", schema=_SCHEMA)
