"""The sizes of the tiny model that the tests of adapters use."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# head_dim is not hidden / heads, and there are fewer key-value heads: what is usually equal differs here.
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 150,
}

# Layer 1 has an MLP, which has another size than an expert; there are more experts than a token is given to.
TINY_QWEN3_MOE = TINY | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
TINY_MIXTRAL = TINY | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}
TINY_MIXTURES = {"qwen3_moe": TINY_QWEN3_MOE, "mixtral": TINY_MIXTRAL}


def write_model_config(directory: Path, **fields: Any) -> Path:
    """A model directory with nothing but config.json; fields set to `...` are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    config: Mapping[str, Any] = TINY | fields
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return directory
