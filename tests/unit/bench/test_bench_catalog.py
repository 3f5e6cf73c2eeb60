"""The catalog's benchmark, small."""

from __future__ import annotations

import json

import pytest

from adapters.catalog.sql import SqlCatalog
from bench import catalog as catalog_bench
from bench.errors import BenchError


@pytest.fixture
def few(monkeypatch):
    for name in ("_NUM_RESOLVED", "_NUM_CACHED", "_NUM_PAGES", "_NUM_IMPORTS"):
        monkeypatch.setattr(catalog_bench, name, 20)
    monkeypatch.setattr(catalog_bench, "_ADAPTERS_AT_A_TIME", 7)


def run(tmp_path, revisions: int, adapters: int) -> dict:
    url = f"sqlite:///{tmp_path}/catalog.db"
    return catalog_bench.run(revisions, adapters, url, "prelude bench catalog", tmp_path / "out.json", print)


@pytest.mark.slow
def test_it_fills_measures_and_writes(tmp_path, few):
    document = run(tmp_path, 100, 30)
    assert json.loads((tmp_path / "out.json").read_text()) == document
    assert (document["revisions"], document["adapters"], document["benchmark"]) == (100, 30, "catalog")
    for key in ("resolve_sql", "list_page", "import"):
        assert 0 < document[f"{key}_p50_ms"] <= document[f"{key}_p99_ms"]
    assert 0 < document["resolve_cached_p50_us"] <= document["resolve_cached_p99_us"]
    for key in (
        "peak_rss_bytes",
        "fill_revisions_per_s",
        "database_bytes",
        "hardware",
        "versions",
        "commit",
        "command",
    ):
        assert document[key]


@pytest.mark.slow
def test_what_it_fills_in_is_what_imports_leave(tmp_path, few, monkeypatch):
    monkeypatch.setattr(catalog_bench, "_NUM_IMPORTS", 0)
    monkeypatch.setattr(catalog_bench, "quantile", lambda values, share: 0)
    monkeypatch.setattr(catalog_bench, "KEPT_CHANGES", 60)
    run(tmp_path, 100, 30)
    catalog = SqlCatalog.open(f"sqlite:///{tmp_path}/catalog.db")
    assert len(set(catalog.referenced_revisions())) == 100
    assert [change.sequence for change in catalog.changes_since(0)] == list(range(41, 101))
    entries = catalog.list()
    assert len(entries) == 30
    for entry in entries:
        details = catalog.show(entry.tenant, entry.name)
        newest = len(details.revisions)
        assert details.aliases == {"latest": newest, "prod": 1}
        for number in range(newest - 1, 0, -1):
            assert catalog.rollback(entry.tenant, entry.name).to_number == number
    catalog.close()


@pytest.mark.slow
def test_what_it_refuses(tmp_path, few):
    with pytest.raises(BenchError, match="40 adapters cannot have 30 revisions"):
        run(tmp_path, 30, 40)
    run(tmp_path, 30, 30)
    with pytest.raises(BenchError, match="is not empty; name an empty database"):
        run(tmp_path, 30, 30)
    with pytest.raises(BenchError, match="there is no folder"):
        catalog_bench.run(1, 1, None, "", tmp_path / "no" / "out.json", print)
    with pytest.raises(BenchError, match="is not the URL of a catalog"):
        catalog_bench.run(1, 1, "mysql://x/y", "", None, print)
    with pytest.raises(BenchError, match="unable to open database file"):
        catalog_bench.run(1, 1, f"sqlite:///{tmp_path}/no/catalog.db", "", None, print)
