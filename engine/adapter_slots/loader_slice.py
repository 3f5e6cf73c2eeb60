"""Measures what an adapter's load costs an engine: from a file in the page cache to memory, and into a slot.

Compares SGLang's way, a PEFT file tensor by tensor, with the packed file. Runs in a separate process because it
imports SGLang: `python -m engine.adapter_slots.loader_slice MODEL NUM_SLOTS FOLDER…` prints JSON. Each folder has
`peft/` and `packed/`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_REPEATS = 5


def main(model: Path, num_slots: int, folders: list[Path]) -> dict[str, Any]:
    """Medians over all adapters and repeats, in milliseconds."""
    from engine import cpu_support

    cpu_support.install()
    import torch
    from safetensors.torch import load_file
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.lora.lora_config import LoRAConfig
    from transformers import AutoConfig

    from adapters.model.base_model import BaseModel
    from adapters.packed.fused_layout import PARTS_OF
    from engine.adapter_slots.packed_adapters import PackedLoader

    torch.set_num_threads(1)
    base, hf_config, load_config = BaseModel.read(model), AutoConfig.from_pretrained(model), LoadConfig()
    rank = LoRAConfig(str(folders[0] / "packed")).r
    shapes = {
        (module, factor, layer): shape
        for module, parts in PARTS_OF.items()
        for layer in range(base.num_layers)
        for factor, shape in (
            ("a", (len(parts) * rank, base.shape_of(module)[1])),
            ("b", (base.shape_of(module)[0], rank)),
        )
    }
    buffers = {key: torch.zeros(num_slots, *shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    loader = PackedLoader(buffers, base, rank, None)

    def load_peft(folder: Path) -> Any:
        adapter: Any = LoRAAdapter("x", LoRAConfig(str(folder / "peft")), hf_config, load_config, None)  # type: ignore[arg-type]
        # Skips SGLang's search for the file, which would only add time.
        adapter.initialize_weights_from_tensors(load_file(folder / "peft" / "adapter_model.safetensors"))
        return adapter

    def load_packed(folder: Path) -> Any:
        return loader.load(folder / "packed", LoRAConfig(str(folder / "packed")))

    times: dict[str, list[float]] = {"peft": [], "packed": [], "packed_to_slot": []}
    for folder in _REPEATS * folders:
        peft, adapter = _timed(times["peft"], load_peft, folder), _timed(times["packed"], load_packed, folder)
        _timed(times["packed_to_slot"], lambda loaded: loader.filler.fill(0, loaded.image), adapter)
    num_tensors = len(load_file(folders[0] / "peft" / "adapter_model.safetensors"))
    assert (
        sum(len(layer.weights) for layer in peft.layers) == 2 * len(PARTS_OF) * base.num_layers
    )  # everything was loaded
    return {f"{name}_ms": statistics.median(measured) for name, measured in times.items()} | {
        "num_tensors": num_tensors
    }


def _timed(times: list[float], step: Callable[[Any], Any], argument: Any) -> Any:
    began_at = time.perf_counter()
    result = step(argument)
    times.append(1000 * (time.perf_counter() - began_at))
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), [Path(word) for word in sys.argv[3:]])))
