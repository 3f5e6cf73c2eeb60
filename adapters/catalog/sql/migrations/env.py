"""What Alembic executes for every command. The connection, in its transaction, comes from `schema.py`."""

from __future__ import annotations

from alembic import context

from adapters.catalog.sql.tables import metadata


def _run() -> None:
    context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
    with context.begin_transaction():
        context.run_migrations()


if __name__ == "env_py":  # as Alembic names it; importing it is without effect
    _run()
