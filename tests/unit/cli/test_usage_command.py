"""`prelude usage`: a table, JSON, and refusals that name the value."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.commands import run_command

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.usage import Counts, Subject


@pytest.fixture
def config(tmp_path: Path) -> Path:
    catalog = SqlCatalog.open(f"sqlite:///{tmp_path / 'catalog.db'}")
    hour = int(datetime(2026, 1, 31, 13, tzinfo=UTC).timestamp()) // 3600
    catalog.usage.put([
        (Subject(hour, "acme", "7h2kq9wmx4ta", "acme/legal", "sha256:1", "demo"), Counts(2, 1, 14, 5, 6, "r1")),
        (Subject(hour, "acme", "", "", "", "demo"), Counts(1, 0, 7, 0, 3, "r1")),
        (Subject(hour + 1, "beta", "", "", "", "demo"), Counts(1, 0, 1000, 0, 3, "r1")),
    ])  # fmt: skip
    catalog.close()
    (tmp_path / "cluster.yaml").write_text(
        f"model: {{path: model, name: demo}}\nworkers: {{u: {{role: unified}}}}\n"
        f"catalog: {{url: 'sqlite:///{tmp_path / 'catalog.db'}'}}\n"
    )
    return tmp_path / "cluster.yaml"


def test_a_table(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("usage", "--config", config, "--from", "2026-01-31", "--to", "2026-02-01")
    status, output, _ = run_command(capsys, *words, "--group-by", "hour,tenant,adapter")
    assert (status, output.splitlines()) == (
        0,
        [
            "hour               tenant  adapter     requests  estimated_requests  prompt_tokens  cached_tokens  "
            "completion_tokens",
            "2026-01-31T13:00Z  acme    -           1         0                   7              0              3",
            "2026-01-31T13:00Z  acme    acme/legal  2         1                   14             5              6",
            "2026-01-31T14:00Z  beta    -           1         0                   1000           0              3",
        ],
    )
    assert run_command(capsys, "usage", "--config", config, "--to", "2026-01-02", "--from", "2026-01-01")[:2] == (
        0,
        "nothing was used then\n",
    )


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("usage", "--config", config, "--json", "--from", "2026-01-31T14:00Z", "--to", "2026-01-31T15:00Z")
    status, output, _ = run_command(capsys, *words)
    counts = {"requests": 1, "estimated_requests": 0, "prompt_tokens": 1000, "cached_tokens": 0}
    assert (status, json.loads(output)) == (
        0,
        {"from": "2026-01-31T14:00:00Z", "to": "2026-01-31T15:00:00Z", "group_by": ["tenant"],
         "data": [{"tenant": "beta", **counts, "completion_tokens": 3}]},
    )  # fmt: skip
    status, output, _ = run_command(capsys, *words, "--tenant", "acme")
    assert (status, json.loads(output)["data"]) == (0, [])


def test_refusals(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (("--from", "May"), "from is 'May'; it must be a whole hour in UTC"),
        (("--group-by", "user"), "group_by has 'user'; it is one or more of hour,tenant,key,adapter,revision,model"),
    ):
        status, _, errors = run_command(capsys, "usage", "--config", config, *words)
        assert status == 2
        assert f"prelude: invalid_field: {message}" in errors
