"""Alembic's entry point for every command. `schema.py` passes the connection, in its transaction."""

from __future__ import annotations

from alembic import context

from adapters.catalog.sql.tables import metadata


def _run() -> None:
    context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()


if __name__ == "env_py":  # the name under which Alembic runs it; importing it has no effect
    _run()
