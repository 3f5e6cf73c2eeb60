"""Concurrent importers and movers of aliases in one process. For test_library_concurrency."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

from adapters.catalog.records import AliasMove
from adapters.catalog.sql import SqlCatalog, database, engines
from adapters.errors import CatalogConflict
from adapters.formats import Limits
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.store import open_store

NUM_IMPORTED = 3  # by each importer
NUM_MOVED = 4  # by each mover
MOVED = "moved"  # the adapter whose alias `prod` all movers move; it has the revisions 1 to NUM_TARGETS
NUM_TARGETS = 3


@dataclass(frozen=True)
class Crowd:
    """What one process does."""

    catalog_url: str
    store_url: str
    model: Path
    sources: Sequence[Path]
    names: Sequence[str]
    importers: range
    movers: range


@dataclass(frozen=True)
class CrowdResult:
    """What the calls of one process returned."""

    imported: list[tuple[str, str, int]]  # (adapter, directory, number)
    moved: list[AliasMove]
    num_conflicts: int


_begin: Barrier


def wait_for(begin: Barrier) -> None:
    """Make this process begin together with the others."""
    global _begin
    _begin = begin


def work(crowd: Crowd) -> CrowdResult:
    """Run all importers and movers, each in its own thread."""
    database.POOL_TIMEOUT_S = engines.POOL_TIMEOUT_S = (
        120  # what they do counts here, not how long so many wait on a slow machine
    )
    catalog = SqlCatalog(crowd.catalog_url, max_connections=12)
    library = AdapterLibrary(catalog, open_store(crowd.store_url), BaseModel.read(crowd.model), Limits(), "bfloat16")
    with ThreadPoolExecutor(len(crowd.importers) + len(crowd.movers)) as pool:
        _begin.wait(60)
        imports = [pool.submit(_import, library, crowd, number) for number in crowd.importers]
        moves = [pool.submit(_move, catalog, number) for number in crowd.movers]
        imported = [each for future in imports for each in future.result()]
        moved = [each for future in moves for each in future.result()]
    catalog.close()
    return CrowdResult(imported, [move for move in moved if move is not None], moved.count(None))


def _import(library: AdapterLibrary, crowd: Crowd, number: int) -> list[tuple[str, str, int]]:
    generator, results = random.Random(number), []
    for _ in range(NUM_IMPORTED):
        name, source = generator.choice(crowd.names), generator.choice(crowd.sources)
        results.append((name, source.name, library.import_directory(name, source, by=str(number)).number))
    return results


def _move(catalog: SqlCatalog, number: int) -> list[AliasMove | None]:
    """Half of the movers do so only from where they have seen the alias; None where it has moved on since."""
    generator, results = random.Random(number), []
    for _ in range(NUM_MOVED):
        target, expected = generator.randint(1, NUM_TARGETS), None
        if number % 2:
            expected = catalog.resolve(f"{MOVED}@prod").number
        try:
            move = catalog.set_alias("default", MOVED, "prod", target, expected=expected, by=str(number))
        except CatalogConflict:
            results.append(None)
            continue
        assert move.to_number == target
        assert expected is None or expected in (move.from_number, target)
        results.append(move)
    return results
