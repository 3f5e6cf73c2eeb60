"""`prelude catalog migrate` creates the tables, in the database that the environment names, and can be repeated."""

import json
import sqlite3
from pathlib import Path

import pytest

from cli.main import main

CONFIG = "model: {path: model, name: demo}\nworkers: {u: {role: unified}}\n"


def test_migrate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    config, database = tmp_path / "cluster.yaml", tmp_path / "elsewhere" / "catalog.db"
    config.write_text(CONFIG)
    monkeypatch.setenv("PRELUDE_CATALOG_URL", f"sqlite:///{database}")
    for _ in range(2):
        main(["catalog", "migrate", "--config", str(config), "--json"])
        assert json.loads(capsys.readouterr().out) == {"migrated": True}
    with sqlite3.connect(database) as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert {"revisions", "alembic_version"} <= tables
