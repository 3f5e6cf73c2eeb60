"""Create or migrate a database's tables."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection

from adapters.catalog.sql.locks import AdvisoryLock, take
from adapters.errors import CatalogTooNew

_MIGRATIONS = Path(__file__).parent


def migrate(connection: Connection) -> None:
    """Run the missing migrations within the caller's transaction. Raises CatalogTooNew."""
    take(connection, AdvisoryLock.MIGRATE)
    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    script = ScriptDirectory.from_config(config)
    current = MigrationContext.configure(connection).get_current_revision()
    if current == script.get_current_head():
        return
    try:
        if current is not None:
            script.get_revision(current)
    except CommandError:
        raise CatalogTooNew(
            f"the catalog's tables are at step {current}, this release knows steps up to "
            f"{script.get_current_head()} only: a newer release has changed them; run that one"
        ) from None
    command.upgrade(config, "head")
