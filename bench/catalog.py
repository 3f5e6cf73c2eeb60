"""Benchmark of a full catalog: latency of resolving from the database and from memory, of listing and importing.

The database is filled by multi-row inserts into its tables, then used through `SqlCatalog` by one thread. Every
latency is the median of five rounds, so that short disturbances do not count.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, insert, make_url, text, update

from adapters.catalog.cached import CachedResolver
from adapters.catalog.sql import SqlCatalog, tables
from adapters.catalog.sql.database import KEPT_CHANGES, Database
from adapters.errors import AdapterError
from adapters.model.manifest import LoraEntry, Manifest
from bench.errors import BenchError, WrongAnswer
from bench.measuring import provenance
from bench.measuring.output import require_folders, write_json
from bench.measuring.quantile import quantile

NUM_TENANTS = 100
PAGE = 100
_RANKS = (4, 8, 16, 32, 64)  # one manifest each
_ADAPTERS_AT_A_TIME = 1000
_NUM_ROUNDS = 5
_NUM_RESOLVED, _NUM_CACHED, _NUM_PAGES, _NUM_IMPORTS = 20_000, 200_000, 1000, 300  # over all rounds
_SEED = 1


def run(
    revisions: int,
    adapters: int,
    database: str | None,
    command: str,
    json_path: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Fill, measure, print, write the file; returns its content. Raises BenchError."""
    require_folders(json_path)
    if adapters > revisions:
        raise BenchError(f"{adapters} adapters cannot have {revisions} revisions; each has at least one")
    facts = provenance.head("catalog", command, {"revisions": revisions, "adapters": adapters})
    facts["versions"] |= {name: version(name) for name in ("sqlalchemy", "psycopg")}
    with tempfile.TemporaryDirectory(prefix="prelude-bench-") as folder:
        url = database or f"sqlite:///{folder}/catalog.db"
        try:
            measured = _measure(_Shape(revisions, adapters), url, progress)
        except (AdapterError, ValueError) as error:
            raise BenchError(str(error)) from error
    document = {**facts, **measured}
    for key, value in measured.items():
        progress(f"  {key:<24} {value}")
    write_json(document, json_path)
    return document


class _Shape:
    """Assigns revisions, numbered from 1, to adapters, numbered from 0. Those of one adapter are consecutive."""

    def __init__(self, num_revisions: int, num_adapters: int):
        self.num_revisions, self.num_adapters = num_revisions, num_adapters

    def tenant(self, adapter: int) -> str:
        return f"tenant-{adapter % NUM_TENANTS:03}"

    def name(self, adapter: int) -> str:
        return f"adapter-{hashlib.sha256(str(adapter).encode()).hexdigest()[:12]}"

    def full_name(self, adapter: int) -> str:
        return f"{self.tenant(adapter)}/{self.name(adapter)}"

    def contents(self, adapter: int) -> range:
        """The ids of an adapter's revisions."""
        share = self.num_revisions / self.num_adapters
        return range(1 + round(adapter * share), 1 + round((adapter + 1) * share))

    def revision_id(self, content: int) -> str:
        return f"sha256:{hashlib.sha256(f'content {content}'.encode()).hexdigest()}"


def _measure(shape: _Shape, url: str, progress: Callable[[str], None]) -> dict[str, Any]:
    catalog = SqlCatalog.open(url)
    if catalog.last_change():
        raise BenchError(f"{make_url(url).render_as_string(hide_password=True)} is not empty; name an empty database")
    progress(f"Filling with {shape.num_revisions} revisions of {shape.num_adapters} adapters.")
    started = time.perf_counter()
    filling = Database(url)
    _fill(filling, shape)
    fill_s = time.perf_counter() - started
    progress("Measuring.")
    generator = random.Random(_SEED)
    rounds = [_measure_round(catalog, shape, generator, number) for number in range(_NUM_ROUNDS)]
    server = filling.read(_server)
    num_bytes = filling.read(_size)
    filling.close()
    catalog.close()
    return {
        "database": server,
        "revisions": shape.num_revisions,
        "adapters": shape.num_adapters,
        "fill_s": round(fill_s, 1),
        "fill_revisions_per_s": round(shape.num_revisions / fill_s),
        "database_bytes": num_bytes,
        "list_page_entries": PAGE,
        "rounds": _NUM_ROUNDS,
        **{name: quantile([each[name] for each in rounds], 0.5) for name in rounds[0]},
        "resolve_sql_p99_ms_of_rounds": [each["resolve_sql_p99_ms"] for each in rounds],
        "load_average_of_rounds": [each["load_average"] for each in rounds],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _measure_round(catalog: SqlCatalog, shape: _Shape, generator: random.Random, number: int) -> dict[str, float]:
    load_average = round(os.getloadavg()[0], 2)
    references = list(_references(shape, generator, _NUM_RESOLVED // _NUM_ROUNDS))
    sql_ns = [_timed(catalog.resolve, reference) for reference in references]
    cached_ns = _cached(catalog, references, generator)
    pages_ns = [
        _timed(lambda after: catalog.list(after=after, limit=PAGE), (shape.tenant(each), shape.name(each)))
        for each in (generator.randrange(shape.num_adapters) for _ in range(_NUM_PAGES // _NUM_ROUNDS))
    ]
    num_imports = _NUM_IMPORTS // _NUM_ROUNDS
    imports_ns = [
        _timed(lambda each: _import(catalog, shape, each), number * num_imports + each) for each in range(num_imports)
    ]
    measured: dict[str, float] = {}
    for name, values, unit, unit_ns in (
        ("resolve_sql", sql_ns, "ms", 1e6),
        ("resolve_cached", cached_ns, "us", 1e3),
        ("list_page", pages_ns, "ms", 1e6),
        ("import", imports_ns, "ms", 1e6),
    ):
        measured[f"{name}_p50_{unit}"] = quantile(values, 0.50) / unit_ns
        measured[f"{name}_p99_{unit}"] = quantile(values, 0.99) / unit_ns
    return measured | {"load_average": load_average}


def _timed(work: Callable[[Any], object], argument: Any) -> int:
    started = time.perf_counter_ns()
    work(argument)
    return time.perf_counter_ns() - started


def _cached(catalog: SqlCatalog, references: Sequence[str], generator: random.Random) -> list[int]:
    with CachedResolver(catalog, max_entries=len(references)) as resolver:
        resolver.refresh()
        for reference in references:
            resolver.resolve(reference)
        for reference in references[:100]:
            if resolver.lookup(reference) != catalog.resolve(reference):
                raise WrongAnswer(f"{reference} is another revision in memory than in the database")
        chosen = generator.choices(references, k=_NUM_CACHED // _NUM_ROUNDS)
        return [_timed(resolver.resolve, reference) for reference in chosen]


def _references(shape: _Shape, generator: random.Random, count: int) -> Iterator[str]:
    """70 % adapter names; aliases, revision numbers and revision ids. Adapters are uniformly distributed."""
    for _ in range(count):
        adapter = generator.randrange(shape.num_adapters)
        contents, full_name = shape.contents(adapter), shape.full_name(adapter)
        match generator.randrange(10):
            case 0:
                yield f"{full_name}@prod"
            case 1:
                yield f"{full_name}@r{generator.randint(1, len(contents))}"
            case 2:
                yield f"{full_name}@{shape.revision_id(generator.choice(contents))}"
            case _:
                yield full_name


def _import(catalog: SqlCatalog, shape: _Shape, number: int) -> None:
    revision_id = shape.revision_id(shape.num_revisions + 1 + number)
    since = catalog.last_change()
    adapter = number % shape.num_adapters
    catalog.add_revision(
        shape.tenant(adapter), shape.name(adapter), _manifest(8), revision_id, 1 << 20, stored_since=since
    )


def _manifest(rank: int) -> Manifest:
    """The manifest of a LoRA on four projections of 32 layers."""
    modules = ("k_proj", "o_proj", "q_proj", "v_proj")
    entries = (LoraEntry(layer, each, rank, 4096, 4096, 2.0, "bfloat16") for layer in range(32) for each in modules)
    return Manifest("sha256:" + "0" * 64, ("lora",), "prefill", tuple(entries), ())


def _fill(database: Database, shape: _Shape) -> None:
    now = datetime.now(UTC)
    manifests = [_manifest(rank).to_json() for rank in _RANKS]

    def insert_common(connection: Connection) -> None:
        _insert(connection, tables.tenants, ({"name": shape.tenant(n), "created_at": now} for n in range(NUM_TENANTS)))
        _insert(
            connection,
            tables.manifests,
            (
                {"id": number, "digest": hashlib.sha256(each.encode()).hexdigest(), "json": each}
                for number, each in enumerate(manifests, 1)
            ),
        )

    database.transact(insert_common)
    for start in range(0, shape.num_adapters, _ADAPTERS_AT_A_TIME):
        some = range(start, min(start + _ADAPTERS_AT_A_TIME, shape.num_adapters))
        database.transact(partial(_insert_adapters, shape, some, now))
    database.transact(lambda connection: _finish(connection, shape))


def _insert_adapters(shape: _Shape, numbers: range, now: datetime, connection: Connection) -> None:
    """Insert the rows that single imports would create, with `prod` at every adapter's first revision."""
    contents = [(number, content) for number in numbers for content in shape.contents(number)]
    firsts = {number: shape.contents(number)[0] for number in numbers}
    _insert(
        connection,
        tables.adapters,
        (
            {
                "id": number + 1,
                "tenant": shape.tenant(number),
                "name": shape.name(number),
                "last_number": len(shape.contents(number)),
                "created_at": now,
            }
            for number in numbers
        ),
    )
    _insert(
        connection,
        tables.revisions,
        (
            {
                "id": content,
                "revision_id": shape.revision_id(content),
                "manifest_id": 1 + content % len(_RANKS),
                "kinds": "lora",
                "positions": "prefill",
                "base_model": "sha256:" + "0" * 64,
                "bytes": 1 << 20,
                "created_at": now,
            }
            for _, content in contents
        ),
    )
    _insert(
        connection,
        tables.adapter_revisions,
        (
            {"adapter_id": number + 1, "number": 1 + content - firsts[number], "content_id": content, "created_at": now}
            for number, content in contents
        ),
    )
    _insert(
        connection,
        tables.changes,
        (
            {"sequence": content, "kind": "import", "adapter_id": number + 1, "changed_at": now}
            for number, content in contents
            if content > shape.num_revisions - KEPT_CHANGES
        ),
    )
    _insert(
        connection,
        tables.alias_moves,
        (
            {
                "adapter_id": number + 1,
                "alias": "latest",
                "sequence": content,
                "from_number": content - firsts[number] or None,
                "to_number": 1 + content - firsts[number],
                "before": content - 1 if content > firsts[number] else None,
                "moved_at": now,
            }
            for number, content in contents
        ),
    )
    _insert(
        connection,
        tables.aliases,
        (
            {"adapter_id": number + 1, "alias": alias, "number": at, "move": move}
            for number in numbers
            for alias, at, move in (
                ("latest", len(shape.contents(number)), shape.contents(number)[-1]),
                ("prod", 1, firsts[number]),
            )
        ),
    )


def _insert(connection: Connection, table: Table, rows: Iterator[dict[str, Any]]) -> None:
    if values := list(rows):
        connection.execute(insert(table), values)


def _finish(connection: Connection, shape: _Shape) -> None:
    connection.execute(update(tables.change_counter).values(last=shape.num_revisions))
    if connection.dialect.name == "postgresql":
        for table, last in (
            ("adapters", shape.num_adapters),
            ("revisions", shape.num_revisions),
            ("manifests", len(_RANKS)),
        ):
            connection.execute(text(f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), {last})"))
        connection.execute(text("ANALYZE"))  # autovacuum would do it a minute later


def _server(connection: Connection) -> str:
    numbers = connection.dialect.server_version_info or ()
    return f"{connection.dialect.name} {'.'.join(map(str, numbers))}"


def _size(connection: Connection) -> int:
    sqlite = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    postgres = "SELECT pg_database_size(current_database())"
    query = postgres if connection.dialect.name == "postgresql" else sqlite
    return connection.execute(text(query)).scalar_one()
