"""An adapter that `prelude adapters convert` has written: a pair answers as offline evaluation, prompt for prompt."""

from pathlib import Path

import pytest
from support.adapters.random_adapters import write_random_lora
from support.clusters.running_cluster import RunningCluster
from support.training.served_answers import compared_answers
from support.training.small_runs import sft_rows, write_jsonl

from adapters.model.base_model import BaseModel
from cli.main import main


def test_what_is_served_is_what_was_evaluated(
    cluster: RunningCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, rows = str(cluster.model_dir), write_jsonl(tmp_path / "rows.jsonl", sft_rows(24))
    converted, config = tmp_path / "converted", cluster.logs.parent / "cluster.yaml"
    everywhere = {"prelude": {"positions": "all"}}
    teacher = write_random_lora(
        tmp_path / "teacher", BaseModel.read(model), seed=31, rank=4, std=0.6, config=everywhere
    )
    few = ("--steps", "4", "--answer-tokens", "8", "--device", "cpu", "--min-agreement", "0")
    main(["adapters", "convert", str(teacher), "--model", model, "--data", str(rows), "--output", str(converted), *few])
    main(["adapters", "import", "converted", str(converted), "--config", str(config)])
    assert "lineage: converted from sha256:" in capsys.readouterr().out
    try:
        without, adapted = compared_answers(cluster.url, cluster.model_dir, rows, [None, ("converted", converted)])
    finally:
        main(["adapters", "delete", "converted", "--config", str(config), "--json"])  # other tests list the adapters
    assert len(adapted.served) == 32
    assert without.served == without.offline
    assert adapted.served == adapted.offline
    assert sum(one != other for one, other in zip(without.served, adapted.served, strict=True)) > 16
