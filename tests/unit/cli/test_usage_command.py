"""`prelude usage`: a table, JSON, and refusals that name the value."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.commands import Prelude

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


def test_a_table(config: Path, prelude: Prelude) -> None:
    words = ("usage", "--config", config, "--from", "2026-01-31", "--to", "2026-02-01")
    assert prelude.prints(*words, "--group-by", "hour,tenant,adapter").splitlines() == [
        "hour               tenant  adapter     requests  estimated_requests  prompt_tokens  cached_tokens  "
        "completion_tokens",
        "2026-01-31T13:00Z  acme    -           1         0                   7              0              3",
        "2026-01-31T13:00Z  acme    acme/legal  2         1                   14             5              6",
        "2026-01-31T14:00Z  beta    -           1         0                   1000           0              3",
    ]
    nothing = prelude.prints("usage", "--config", config, "--to", "2026-01-02", "--from", "2026-01-01")
    assert nothing == "nothing was used then\n"


def test_json(config: Path, prelude: Prelude) -> None:
    words = ("usage", "--config", config, "--from", "2026-01-31T14:00Z", "--to", "2026-01-31T15:00Z")
    counts = {"requests": 1, "estimated_requests": 0, "prompt_tokens": 1000, "cached_tokens": 0}
    assert prelude.json(*words) == {
        "from": "2026-01-31T14:00:00Z", "to": "2026-01-31T15:00:00Z", "group_by": ["tenant"],
        "data": [{"tenant": "beta", **counts, "completion_tokens": 3}],
    }  # fmt: skip
    assert prelude.json(*words, "--tenant", "acme")["data"] == []


def test_refusals(config: Path, prelude: Prelude) -> None:
    for words, message in (
        (("--from", "May"), "from is 'May'; it must be a whole hour in UTC"),
        (("--group-by", "user"), "group_by has 'user'; it is one or more of hour,tenant,key,adapter,revision,model"),
    ):
        prelude.refuses("usage", "--config", config, *words, says=f"prelude: invalid_field: {message}", status=2)
