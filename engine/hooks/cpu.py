"""Bodies of the hooks that only a CPU engine needs."""

from __future__ import annotations

import multiprocessing
import types
from typing import Any


class _UnpinnedTorch(types.ModuleType):
    """`torch` for one module, without page-locked memory, which a CPU-only build refuses."""

    def __init__(self, torch: types.ModuleType) -> None:
        super().__init__("torch")
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, *args, pin_memory: bool = False, **kwargs):
        return self._torch.tensor(*args, **kwargs)

    def full(self, *args, pin_memory: bool = False, **kwargs):
        return self._torch.full(*args, **kwargs)

    def zeros(self, *args, pin_memory: bool = False, **kwargs):
        return self._torch.zeros(*args, **kwargs)


def fork_children(_result, _server_args) -> None:
    """Have the engine's other processes forked, so that they need not import everything again.

    With a GPU they must be spawned: CUDA does not survive a fork.
    """
    multiprocessing.set_start_method("fork", force=True)


def unpinned_torch(torch: types.ModuleType) -> types.ModuleType:
    """A replacement for the name `torch` in one module."""
    return _UnpinnedTorch(torch)


def pin_memory_is_identity(original, tensor, *_args, **_kwargs):
    """Return the tensor as it is: without an accelerator, page-locking has no use."""
    return tensor


def register_kv_as_dram(original, _kinds, expected_len: int):
    """Label every KV buffer as host memory."""
    return original(["DRAM"] * expected_len, expected_len)


def cut_kv_in_host_memory(original, manager, peer):
    """Prepare transfers by heads between host memories, which SGLang prepares between GPUs only."""
    if peer.decode_tp_size == manager.attn_tp_size:
        return original(manager, peer)
    peer.dst_homogeneous_mem_kind = manager.src_mem_kind
    return manager._init_hetero_tp_prep_handle(
        peer.agent_name, peer, src_mem_kind=manager.src_mem_kind, dst_mem_kind=manager.src_mem_kind
    )


def mask_vocabulary_on_cpu(original, *owner, logits, vocab_mask):
    """Apply a grammar's token mask with xgrammar's CPU kernel. `owner` is the grammar, or empty."""
    if logits.device.type != "cpu":
        return original(*owner, logits=logits, vocab_mask=vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
    return None
