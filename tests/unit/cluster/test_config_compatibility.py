"""A cluster.yaml of 0.1.0 (data/generate.py) says the same now, as the rule at the top of the schema promises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.config.schema import ClusterConfig

DATA = Path(__file__).parent / "data"
# Defaults that were changed on purpose, each with its reason in the changelog: of 0.1.0, and now.
CHANGED_DEFAULTS = {".config.residency.lease_s": (0.5, 0.1)}


def check_same(found: Any, expected: Any, place: str = "") -> None:
    """Every field has the value that 0.1.0 read; fields that it did not know may be there too."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            assert key in found, f"{place}.{key}"
            check_same(found[key], value, f"{place}.{key}")
    elif (expected, found) != CHANGED_DEFAULTS.get(place):
        assert found == expected, place


def answers_of(config: ClusterConfig) -> dict[str, Any]:
    engines = {worker: config.engine_of(worker).model_dump(mode="json") for worker in config.workers}
    return {"config": config.model_dump(mode="json"), "engines": engines}


@pytest.mark.parametrize("name", ["cluster", "smallest"])
def test_it_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    shutil.copyfile(DATA / f"{name}-0.1.0.yaml", path)
    expected = json.loads((DATA / f"{name}-0.1.0.json").read_text().replace("{folder}", str(tmp_path.resolve())))
    config = load_cluster_config(path)
    check_same(answers_of(config), expected)
    dump_cluster_config(config, tmp_path / "printed.yaml")
    assert load_cluster_config(tmp_path / "printed.yaml") == config


def test_a_changed_default_or_a_lost_field_is_found() -> None:
    expected = json.loads((DATA / "smallest-0.1.0.json").read_text())
    changed = json.loads(json.dumps(expected))
    changed["config"]["router"]["max_attempts"] += 1
    with pytest.raises(AssertionError, match=r"config\.router\.max_attempts"):
        check_same(changed, expected)
    del changed["config"]["router"]["max_attempts"]
    with pytest.raises(AssertionError, match=r"config\.router\.max_attempts"):
        check_same(changed, expected)
