"""Trajectories, their open steps, judgements and bodies."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None

_SCHEMA = "trajectories"
_TIME = sa.DateTime(timezone=True)
_TEXTS = (
    "rollout_id",
    "group_id",
    "dataset",
    "instance_id",
    "repo",
    "website",
    "split",
    "harness",
    "model",
    "policy_version",
    "teacher",
    "sandbox_id",
    "trace_id",
)
_COUNTS = ("steps", "turns", "prompt_tokens", "completion_tokens", "cached_tokens", "text_bytes", "longest_tokens")


def upgrade() -> None:
    op.create_table(
        "trajectories",
        sa.Column("key", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("trajectory_id", sa.Text, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in _TEXTS),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("tools_hash", sa.Text, nullable=False),
        sa.Column("metadata_json", sa.Text, nullable=False),
        sa.Column("labels", JSONB, nullable=False),
        sa.Column("description_hash", sa.Text, nullable=False),
        sa.Column("status", sa.SmallInteger, nullable=False),
        sa.Column("status_message", sa.Text, nullable=False),
        sa.Column("writer", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in _COUNTS),
        sa.Column("cost_usd", sa.Double, nullable=False),
        sa.Column("outcome_state", sa.SmallInteger),
        sa.Column("outcome_value", sa.Double),
        sa.Column("object_name", sa.Text, nullable=False),
        sa.Column("content_hash", sa.Text, nullable=False),
        sa.Column("create_time", _TIME, nullable=False),
        sa.Column("seal_time", _TIME),
        sa.UniqueConstraint("tenant", "trajectory_id", name="trajectories_id"),
        schema=_SCHEMA,
    )
    tokens = sa.text("(prompt_tokens + completion_tokens)")
    for name, columns in (
        ("created", ["create_time"]),
        ("turns", ["turns"]),
        ("tokens", [tokens]),
        ("cost", ["cost_usd"]),
        ("group", ["group_id"]),
        ("rollout", ["rollout_id"]),
        ("instance", ["instance_id"]),
        ("repo", ["repo", "create_time"]),
        ("harness", ["harness", "create_time"]),
        ("model", ["model", "create_time"]),
    ):
        op.create_index(f"trajectories_{name}", "trajectories", ["tenant", *columns, "key"], schema=_SCHEMA)
    # Those without an outcome come last in both directions.
    op.create_index(
        "trajectories_outcome",
        "trajectories",
        ["tenant", sa.text("(outcome_value IS NULL)"), "outcome_value", "key"],
        schema=_SCHEMA,
    )
    op.create_index("trajectories_labels", "trajectories", ["labels"], schema=_SCHEMA, postgresql_using="gin")
    op.create_index(
        "trajectories_unpacked",
        "trajectories",
        ["seal_time"],
        schema=_SCHEMA,
        postgresql_where=sa.text("object_name = '' AND seal_time IS NOT NULL"),
    )
    op.create_table(
        "steps",
        sa.Column("trajectory_key", sa.BigInteger, primary_key=True),
        sa.Column("index", sa.BigInteger, primary_key=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        schema=_SCHEMA,
    )
    # Compressed once, with all its neighbours, when the trajectory is packed.
    op.execute(f"ALTER TABLE {_SCHEMA}.steps ALTER COLUMN body SET STORAGE EXTERNAL")
    op.create_table(
        "tools",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("hash", sa.Text, primary_key=True),
        sa.Column("body", sa.Text, nullable=False),
        schema=_SCHEMA,
    )
    op.create_table(
        "annotations",
        sa.Column("key", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("trajectory_key", sa.BigInteger, nullable=False),
        sa.Column("annotation_id", sa.Text, nullable=False),
        sa.Column("content_hash", sa.Text, nullable=False),
        sa.Column("labels", JSONB, nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.UniqueConstraint("trajectory_key", "annotation_id", name="annotations_id"),
        schema=_SCHEMA,
    )
    op.create_table(
        "rewards",
        sa.Column("key", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("annotation_key", sa.BigInteger, nullable=False, index=True),
        sa.Column("trajectory_key", sa.BigInteger, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("value", sa.Double),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("rubric", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("details_json", sa.Text, nullable=False),
        sa.Column("time", _TIME, nullable=False),
        schema=_SCHEMA,
    )
    op.create_index(
        "rewards_newest", "rewards", ["trajectory_key", "name", "judge", "rubric", sa.text("key DESC")], schema=_SCHEMA
    )
    op.create_table(
        "step_values",
        sa.Column("key", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("annotation_key", sa.BigInteger, nullable=False, index=True),
        sa.Column("trajectory_key", sa.BigInteger, nullable=False),
        sa.Column("index", sa.BigInteger, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=False),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("version", sa.Text, nullable=False),
        schema=_SCHEMA,
    )
    op.create_index(
        "step_values_newest",
        "step_values",
        ["trajectory_key", "index", "name", "judge", sa.text("key DESC")],
        schema=_SCHEMA,
    )
    op.create_table(
        "blobs",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("sha256", sa.Text, primary_key=True),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("media_type", sa.Text, nullable=False),
        sa.Column("put_time", _TIME, nullable=False),
        schema=_SCHEMA,
    )
    op.create_index("blobs_put", "blobs", ["put_time"], schema=_SCHEMA)
    op.create_table(
        "blob_references",
        sa.Column("trajectory_key", sa.BigInteger, primary_key=True),
        sa.Column("sha256", sa.Text, primary_key=True),
        sa.Column("tenant", sa.Text, nullable=False),
        schema=_SCHEMA,
    )
    op.create_index("blob_references_of", "blob_references", ["tenant", "sha256"], schema=_SCHEMA)
    op.create_table(
        "garbage",
        sa.Column("object_name", sa.Text, primary_key=True),
        sa.Column("time", _TIME, nullable=False),
        schema=_SCHEMA,
    )


def downgrade() -> None:
    for table in (
        "garbage",
        "blob_references",
        "blobs",
        "step_values",
        "rewards",
        "annotations",
        "tools",
        "steps",
        "trajectories",
    ):
        op.drop_table(table, schema=_SCHEMA)
