"""How the catalog's tables came about, step by step; Alembic runs what a database lacks."""
