"""Body of the hook that runs after SGLang allocates its adapter slots and before it sizes the KV cache."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engine.hooks.packed import make_packed_loader
from engine.hooks.reft import add_reft_to_layers

# Options under which the hooks would read stale or foreign metadata.
_UNSUPPORTED = {
    "enable_lora_overlap_loading": "slots are filled on a stream of their own already, for the next batch",
    "enable_dp_attention": "batches without tokens bypass the hooks",
    "max_loaded_loras": "the engine would evict adapters on its own, and the agent would not know",
    "speculative_algorithm": "the hooks do not tell verified draft tokens from prompt and answer",
}


def check_supported(server_args, backend_name: str, environment: Mapping[str, str]) -> None:
    """Raise ValueError for settings under which adapters would give wrong results."""
    for name, why in _UNSUPPORTED.items():
        if getattr(server_args, name, None):
            option = name.replace("_", "-")
            raise ValueError(f"--{option} cannot be used with adapters: {why}; remove it from extra_arguments")
    if getattr(server_args, "tokenizer_worker_num", 1) > 1:
        raise ValueError(
            "--tokenizer-worker-num above 1 cannot be used with adapters: each of these processes would know only its "
            "own requests, and an adapter could be unloaded under another one's; remove it from extra_arguments"
        )
    if backend_name not in ("csgmv", "torch_native"):
        raise ValueError(f"--lora-backend {backend_name} is not supported; use csgmv on GPU, torch_native on a CPU")
    if environment.get("SGLANG_EXPERIMENTAL_LORA_OPTI", "").lower() in ("1", "true", "yes", "on", "y", "t"):
        raise ValueError("SGLANG_EXPERIMENTAL_LORA_OPTI reads slots beyond an adapter's rank; unset it")


def complement_memory_pool(result, manager):
    """Check the settings, then attach the packed loader and the ReFT pool to the memory pool."""
    from sglang.srt.runtime_context import get_server_args

    check_supported(get_server_args(), manager.lora_backend.name, os.environ)
    make_packed_loader(manager)
    add_reft_to_layers(manager)
    return result
