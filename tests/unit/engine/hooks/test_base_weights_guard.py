"""An engine over several nodes starts only if their ranks have read the same base model."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.hooks.guards.base_weights import check_same_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip


def model_in(folder: Path, **changes: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def rank_of(
    number: int, folder: Path, model: str, overrides: str, num_nodes: int, found: multiprocessing.Queue[tuple[int, str]]
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=number, world_size=2)
    server_args = SimpleNamespace(nnodes=num_nodes, model_path=model, json_model_override_args=overrides)
    try:
        check_same_weights(SimpleNamespace(server_args=server_args, tp_cpu_group=dist.group.WORLD))
    except ValueError as error:
        found.put((number, str(error)))
    else:
        found.put((number, ""))
    dist.barrier()


@pytest.mark.parametrize(
    ("changes", "overrides", "num_nodes", "differ"),
    [
        ({}, "{}", 2, False),
        ({"rope_theta": 500000.0}, "{}", 2, True),
        ({}, '{"rope_theta": 500000.0}', 2, True),
        ({"rope_theta": 500000.0}, "{}", 1, False),  # one node reads one directory
    ],
)
def test_nodes_with_another_base_model_are_named(
    tmp_path: Path, changes: dict[str, object], overrides: str, num_nodes: int, differ: bool
):
    models = model_in(tmp_path / "first"), model_in(tmp_path / "second", **changes)
    spawned = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[tuple[int, str]] = spawned.Queue()
    ranks = [
        spawned.Process(target=rank_of, args=(number, tmp_path, model, given, num_nodes, found), daemon=True)
        for number, (model, given) in enumerate(zip(models, ("{}", overrides), strict=True))
    ]
    for rank in ranks:
        rank.start()
    complaints = [complaint for _, complaint in sorted(found.get(timeout=60) for _ in ranks)]
    for rank in ranks:
        rank.join(60)
    if not differ:
        assert complaints == ["", ""]
        return
    for model, other, complaint in zip(models, ("[1]", "[0]"), complaints, strict=True):
        assert model in complaint
        assert f"ranks {other}, on other nodes" in complaint
