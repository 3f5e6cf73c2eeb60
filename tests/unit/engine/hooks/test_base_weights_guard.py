"""An engine over several nodes starts only if their ranks have read the same base model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.engines.gloo_ranks import on_ranks

from engine.hooks.guards.base_weights import check_same_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "vocab_size": 500,
}  # fmt: skip


def model_in(folder: Path, **changes: object) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def complaint_of(model: str, overrides: str, num_nodes: int) -> str:
    import torch.distributed as dist

    server_args = SimpleNamespace(nnodes=num_nodes, model_path=model, json_model_override_args=overrides)
    try:
        check_same_weights(SimpleNamespace(server_args=server_args, tp_cpu_group=dist.group.WORLD))
    except ValueError as error:
        return str(error)
    return ""


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
    given = [(models[0], "{}", num_nodes), (models[1], overrides, num_nodes)]
    complaints = on_ranks(tmp_path, complaint_of, given)
    if not differ:
        assert complaints == ["", ""]
        return
    for model, other, complaint in zip(models, ("[1]", "[0]"), complaints, strict=True):
        assert model in complaint
        assert f"ranks {other}, on other nodes" in complaint
