"""Create or migrate a database's tables."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, insert

from adapters.catalog.sql.locks import AdvisoryLock, take
from adapters.catalog.sql.tables import change_counter, metadata
from adapters.errors import CatalogTooNew

_MIGRATIONS = Path(__file__).parent


def migrate(connection: Connection) -> None:
    """Create the tables, or run the missing steps, within the caller's transaction. Raises CatalogTooNew."""
    take(connection, AdvisoryLock.MIGRATE)
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    context = MigrationContext.configure(connection)
    current, head = context.get_current_revision(), script.get_current_head()
    if current == head:
        return
    if current is None:
        metadata.create_all(connection)
        connection.execute(insert(change_counter), {"id": 1, "last": 0})
        context.stamp(script, str(head))
        return
    try:
        script.get_revision(current)
    except CommandError:
        raise CatalogTooNew(
            f"the catalog's tables are at step {current}, which this release does not know; its own is {head}. Run the "
            "release that made them; tables from before 0.1.0 are brought up to date by 0.1.0"
        ) from None
    command.upgrade(config, "head")
