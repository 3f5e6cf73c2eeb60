"""Experts of gpt-oss whose random weights MXFP4 holds exactly, and a checkpoint that has them in MXFP4 as published."""

import json
from pathlib import Path
from typing import Any

_BLOCK = 32  # weights that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; with 8 more they are negative
_EXPERTS = ("gate_up_proj", "down_proj")


def draw_experts(model: Any) -> dict[str, Any]:
    """Give a model such experts. Returns their tensors in MXFP4, by name."""
    import torch

    stored = {}
    for name, parameter in model.named_parameters():
        if not name.endswith(_EXPERTS):
            continue
        count, columns, rows = parameter.shape  # transformers keeps them transposed
        codes = torch.randint(16, (count, rows, columns // _BLOCK, _BLOCK), dtype=torch.uint8)
        scales = torch.randint(120, 123, codes.shape[:-1], dtype=torch.uint8)  # exponents of two, from -127
        values = torch.tensor(_MAGNITUDES + tuple(-each for each in _MAGNITUDES))[codes.long()]
        weights = torch.ldexp(values, scales.int().unsqueeze(-1) - 127).reshape(count, rows, columns)
        parameter.copy_(weights.mT)
        stored[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        stored[f"{name}_scales"] = scales
    return stored


def store_experts(folder: Path, stored: dict[str, Any]) -> None:
    """Put them in the place of the experts' weights in a saved model."""
    from safetensors.torch import load_file, save_file

    [path] = folder.glob("*.safetensors")
    others = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(_EXPERTS)}
    save_file({**others, **stored}, path, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(config))
