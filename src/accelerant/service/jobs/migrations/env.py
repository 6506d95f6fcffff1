"""Alembic's environment: it runs revisions on the connection of JobStore.upgrade, in its transaction."""

from alembic import context

if __name__ == "env_py":  # as which Alembic loads it
    given = context.config.attributes
    context.configure(connection=given["connection"], version_table=given["version_table"])
    with context.begin_transaction():
        context.run_migrations()
