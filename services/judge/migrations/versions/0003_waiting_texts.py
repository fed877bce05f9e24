"""Texts of answers that are on their way to the object store."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_SCHEMA = "judge"


def upgrade() -> None:
    op.create_table(
        "waiting_texts",
        sa.Column("tenant", sa.Text(), primary_key=True),
        sa.Column("sha256", sa.Text(), primary_key=True),
        sa.Column("text", sa.Text(), nullable=False),
        schema=_SCHEMA,
    )


def downgrade() -> None:
    # Those that are still there would be lost with it.
    waiting = op.get_bind().execute(sa.text(f"SELECT count(*) FROM {_SCHEMA}.waiting_texts")).scalar_one()  # noqa: S608
    if waiting:
        raise RuntimeError(
            f"{waiting} answers are not yet in the object store: let the judge service run until they are"
        )
    op.drop_table("waiting_texts", schema=_SCHEMA)
