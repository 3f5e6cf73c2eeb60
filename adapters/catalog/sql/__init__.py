"""A catalog in a SQL database: SQLite on one machine, PostgreSQL for a cluster."""

from adapters.catalog.sql.catalog import SqlCatalog

__all__ = ["SqlCatalog"]
