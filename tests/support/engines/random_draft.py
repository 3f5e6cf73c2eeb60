"""A draft model for EAGLE with small random weights, for a model in Llama's layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_random_draft(model: Path, folder: Path, seed: int = 0) -> Path:
    """Write it. It guesses that the last token comes again, which is sometimes right for random models."""
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, keys = (size * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(*shape, generator=generator)

    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    tensors = {f"layers.0.{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors |= {
        "fc.weight": torch.cat([random(hidden, hidden), torch.eye(hidden)], dim=1),  # of a token, and of a state
        "fc.bias": torch.zeros(hidden),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
