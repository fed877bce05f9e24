"""Alembic's entry: runs within the connection and schema that services.common.db gives."""

from alembic import context

config = context.config
connection = config.attributes["connection"]
context.configure(
    connection=connection,
    version_table_schema=config.attributes["schema"],
    include_schemas=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
