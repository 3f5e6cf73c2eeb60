"""The migrations of the catalog's tables; Alembic runs those that a database lacks."""
