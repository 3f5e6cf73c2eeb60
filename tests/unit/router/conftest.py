"""Databases for the catalogs of routers, the same as those of the catalog's own tests."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.append(str(Path(__file__).parents[1] / "adapters"))  # catalog_databases

if TYPE_CHECKING:
    from catalog_databases import CatalogDatabase

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of a PostgreSQL server of this session's own."""
    from catalog_databases import postgres_server

    with postgres_server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> CatalogDatabase:
    """An empty database, once of each kind."""
    from catalog_databases import PostgresDatabase, SqliteDatabase

    if request.param == "sqlite":
        return SqliteDatabase(tmp_path / "catalog")
    return PostgresDatabase(request.getfixturevalue("postgres"), f"router_{next(_numbers)}")
