"""The tables of schema `trajectories`, as the migrations make them."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from services.trajectories.model import TEXT_FIELDS

SCHEMA: Final = "trajectories"
_metadata: Final = sa.MetaData(schema=SCHEMA)
_TIME: Final = sa.DateTime(timezone=True)
COUNTS: Final = (
    "steps",
    "turns",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "text_bytes",
    "longest_tokens",
)

TRAJECTORIES: Final = sa.Table(
    "trajectories",
    _metadata,
    sa.Column("key", sa.BigInteger, primary_key=True),
    sa.Column("tenant", sa.Text),
    sa.Column("trajectory_id", sa.Text),
    *(sa.Column(name, sa.Text) for name in TEXT_FIELDS),
    sa.Column("attempt", sa.Integer),
    sa.Column("tools_hash", sa.Text),
    sa.Column("metadata_json", sa.Text),
    sa.Column("labels", JSONB),
    sa.Column("description_hash", sa.Text),
    sa.Column("status", sa.SmallInteger),
    sa.Column("status_message", sa.Text),
    sa.Column("writer", sa.Text),
    *(sa.Column(name, sa.BigInteger) for name in COUNTS),
    sa.Column("cost_usd", sa.Double),
    sa.Column("outcome_state", sa.SmallInteger),
    sa.Column("outcome_value", sa.Double),
    sa.Column("object_name", sa.Text),
    sa.Column("content_hash", sa.Text),
    sa.Column("create_time", _TIME),
    sa.Column("seal_time", _TIME),
)

COLUMNS: Final = ", ".join(column.name for column in TRAJECTORIES.c)
"""Of TRAJECTORIES, for queries to the driver itself."""

STEPS: Final = sa.Table(
    "steps",
    _metadata,
    sa.Column("trajectory_key", sa.BigInteger, primary_key=True),
    sa.Column("index", sa.BigInteger, primary_key=True),
    sa.Column("body", sa.LargeBinary),
)

TOOLS: Final = sa.Table(
    "tools",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("hash", sa.Text, primary_key=True),
    sa.Column("body", sa.Text),
)

ANNOTATIONS: Final = sa.Table(
    "annotations",
    _metadata,
    sa.Column("key", sa.BigInteger, primary_key=True),
    sa.Column("trajectory_key", sa.BigInteger),
    sa.Column("annotation_id", sa.Text),
    sa.Column("content_hash", sa.Text),
    sa.Column("labels", JSONB),
    sa.Column("time", _TIME),
)

REWARDS: Final = sa.Table(
    "rewards",
    _metadata,
    sa.Column("key", sa.BigInteger, primary_key=True),
    sa.Column("annotation_key", sa.BigInteger),
    sa.Column("trajectory_key", sa.BigInteger),
    sa.Column("name", sa.Text),
    sa.Column("state", sa.SmallInteger),
    sa.Column("value", sa.Double),
    sa.Column("reason", sa.Text),
    sa.Column("judge", sa.Text),
    sa.Column("rubric", sa.Text),
    sa.Column("version", sa.Text),
    sa.Column("details_json", sa.Text),
    sa.Column("time", _TIME),
)

STEP_VALUES: Final = sa.Table(
    "step_values",
    _metadata,
    sa.Column("key", sa.BigInteger, primary_key=True),
    sa.Column("annotation_key", sa.BigInteger),
    sa.Column("trajectory_key", sa.BigInteger),
    sa.Column("index", sa.BigInteger),
    sa.Column("name", sa.Text),
    sa.Column("value", sa.Double),
    sa.Column("judge", sa.Text),
    sa.Column("version", sa.Text),
)

BLOBS: Final = sa.Table(
    "blobs",
    _metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("size", sa.BigInteger),
    sa.Column("media_type", sa.Text),
    sa.Column("put_time", _TIME),
)

BLOB_REFERENCES: Final = sa.Table(
    "blob_references",
    _metadata,
    sa.Column("trajectory_key", sa.BigInteger, primary_key=True),
    sa.Column("sha256", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text),
)

GARBAGE: Final = sa.Table(
    "garbage",
    _metadata,
    sa.Column("object_name", sa.Text, primary_key=True),
    sa.Column("time", _TIME),
)

GROUPS: Final = sa.Table(
    "groups",
    _metadata,
    sa.Column("key", sa.BigInteger, primary_key=True),
    sa.Column("tenant", sa.Text),
    sa.Column("group_id", sa.Text),
    *(sa.Column(name, sa.Text) for name in ("dataset", "instance_id", "repo", "website", "split")),
    *(sa.Column(name, sa.Integer) for name in ("group_size", "maximum", "stride", "started")),
    sa.Column("low", sa.Double),
    sa.Column("high", sa.Double),
    *(sa.Column(name, sa.Boolean) for name in ("eager", "need_positive", "closed", "short", "fallback", "keep")),
    sa.Column("verdict_reason", sa.Text),
    sa.Column("create_time", _TIME),
    sa.Column("close_time", _TIME),
)

SAMPLES: Final = sa.Table(
    "samples",
    _metadata,
    sa.Column("group_key", sa.BigInteger, primary_key=True),
    sa.Column("index", sa.Integer, primary_key=True),
    sa.Column("cause", sa.Integer),
    sa.Column("worker", sa.Text),
    sa.Column("lease_time", _TIME),
    sa.Column("claim_id", sa.Text),
    sa.Column("claim_hash", sa.Text),
    sa.Column("outcome", sa.SmallInteger),
    sa.Column("reward", sa.Double),
    sa.Column("reason", sa.Text),
    sa.Column("trajectory_id", sa.Text),
    sa.Column("arrival", sa.Integer),
    sa.Column("place", sa.Integer),
    sa.Column("advantage", sa.Double),
    sa.Column("trainable", sa.Boolean),
)
