"""An adapter that `prelude adapters convert` has written: a pair answers as offline evaluation, prompt for prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.clusters.running_cluster import RunningCluster
from support.training.small_runs import sft_rows, write_jsonl

from adapters.model.base_model import BaseModel
from cli.main import main
from samples.random_adapters import write_random_lora


def test_what_is_served_is_what_was_evaluated(
    cluster: RunningCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, rows = str(cluster.model_dir), str(write_jsonl(tmp_path / "rows.jsonl", sft_rows(24)))
    converted, config = tmp_path / "converted", cluster.logs.parent / "cluster.yaml"
    everywhere = {"prelude": {"positions": "all"}}
    teacher = write_random_lora(
        tmp_path / "teacher", BaseModel.read(model), seed=31, rank=4, std=0.6, config=everywhere
    )
    few = ("--steps", "4", "--answer-tokens", "8", "--device", "cpu", "--force")
    main(["adapters", "convert", str(teacher), "--model", model, "--data", rows, "--output", str(converted), *few])
    main(["adapters", "import", "converted", str(converted), "--config", str(config)])
    assert "lineage: converted from sha256:" in capsys.readouterr().out
    asked = ("--model", model, "--data", rows, "--url", cluster.url)
    try:
        main(["train", "eval", *asked, "--adapter", "converted", "--compare", str(converted), "--json"])
    finally:
        main(["adapters", "delete", "converted", "--config", str(config), "--json"])  # other tests list the adapters
    (without, adapted), _end = json.JSONDecoder().raw_decode(capsys.readouterr().out)
    assert len(adapted["answers"]) == 32
    assert (without["num_failed"], adapted["num_failed"]) == (0, 0)
    assert (without["differing"], adapted["differing"]) == ([], [])
    changed = [
        one["given"] != other["given"] for one, other in zip(without["answers"], adapted["answers"], strict=True)
    ]
    assert sum(changed) > 16
