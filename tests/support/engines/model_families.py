"""Small models of every family, with random weights."""

from __future__ import annotations

from pathlib import Path

from cluster.local.demo import make_model

SIZES = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def make_family(name: str, folder: Path) -> None:
    """A small model of one family with random weights, and the demo's tokenizer."""
    import torch
    import transformers

    make_model(folder, hidden=64, num_layers=3)
    if name == "llama":
        return
    make = {
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
            # Heads of 64: on a GPU SGLang's kernel for this family has no narrower ones.
            {"head_dim": 64, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
             "norm_topk_prob": True},
        ),
        "mixtral": (
            transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4, "head_dim": 16},
        ),
    }  # fmt: skip
    config_type, model_type, extra = make[name]
    torch.manual_seed(1)
    model = model_type(config_type(**SIZES, eos_token_id=0, bos_token_id=None, pad_token_id=0, **extra))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and norms that are not trivial
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    model.save_pretrained(folder)
