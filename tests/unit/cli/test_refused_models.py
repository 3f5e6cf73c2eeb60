"""Base models that Prelude does not serve are refused by name, with the reason, wherever a user meets them first."""

import json
from pathlib import Path

import pytest
from support.adapters.tiny_model import TINY
from support.clusters.paired_agents import decode_agent
from support.commands import Prelude

from cluster.errors import ConfigError

COMMANDS = (
    "init --model {folder}/model --config {folder}/new.yaml",
    "adapters verify {folder} --model {folder}/model",
    "adapters import acme/legal {folder} --config {folder}/cluster.yaml",
)


@pytest.mark.parametrize(
    ("architecture", "because"),
    [
        ("DeepseekV2ForCausalLM", "MLA"),
        ("DeepseekV3ForCausalLM", "MLA"),
        ("Glm4MoeLiteForCausalLM", "MLA"),
        ("KimiK25ForConditionalGeneration", "MLA"),
        ("Qwen3NextForCausalLM", "hybrid: SGLang's CPU engines"),
        ("Qwen3_5ForConditionalGeneration", "hybrid: SGLang's CPU engines"),
        ("Qwen3_5MoeForConditionalGeneration", "hybrid: SGLang's CPU engines"),
        ("NemotronHForCausalLM", "hybrid: SGLang's CPU engines"),
        ("Gemma4ForConditionalGeneration", "two sizes"),
        ("Llama4ForConditionalGeneration", "in chunks"),
        ("GPT2LMHeadModel", "adapters are served for LlamaForCausalLM"),
    ],
)
def test_refused_by_name_with_the_reason(prelude: Prelude, tmp_path: Path, architecture: str, because: str):
    model = tmp_path / "model"
    model.mkdir()
    fields = {**TINY, "architectures": [architecture]}
    (model / "config.json").write_text(json.dumps(fields))
    (tmp_path / "adapter_config.json").write_text("{}")
    workers = "workers: {p: {role: prefill}, d: {role: decode}}"
    (tmp_path / "cluster.yaml").write_text(f"model: {{path: {model}, name: demo}}\n{workers}\n")
    for command in COMMANDS:
        status, _, said = prelude(*command.format(folder=tmp_path).split())
        assert (status != 0, architecture in said, because in said) == (True, True, True), said
    with pytest.raises(ConfigError, match=rf"model\.path: .*{architecture}.*{because}"):
        decode_agent(model, fields)
