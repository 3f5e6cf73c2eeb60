"""No prefill batch waits for the GPU while its LoRA is prepared, with PRELUDE_TEST_DEVICE=cuda."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
from support.engines.running_engine import DEVICE

from engine.hooks import lora_kernels

SLOTS = 4


def backend_with(prepare: Any, device: str) -> Any:
    """SGLang's backend, with this function around its own preparation for lm_head."""
    from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend

    settings = SimpleNamespace(max_lora_chunk_size=128)
    backend = ChunkedSgmvLoRABackend(max_loras_per_batch=SLOTS, device=device, server_args=settings)
    backend._prepare_lm_head_batch_info = functools.partial(prepare, backend._prepare_lm_head_batch_info, backend)
    return backend


def prepare_batch(backend: Any) -> None:
    """For two prompts of 200 and 60 tokens."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    lengths = [200, 60]
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        batch_size=2,
        extend_num_tokens=sum(lengths),
        extend_seq_lens_cpu=lengths,
        extend_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        return_logprob=False,
    )
    backend.prepare_lora_batch(batch, [1, 0], [0, 8, 0, 0], [0.0, 1.0, 0.0, 0.0], use_cuda_graph=False)


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU runs everything in order")
def test_no_wait_for_the_gpu():
    import torch

    without = backend_with(lambda original, _backend, *args: original(*args), "cuda")
    with_hook = backend_with(lora_kernels.prepare_nothing_for_lm_head, "cuda")
    prepare_batch(without)  # the first use of a GPU waits anyway
    torch.cuda.set_sync_debug_mode("error")
    try:
        prepare_batch(with_hook)
        with pytest.raises(RuntimeError, match="synchroniz"):
            prepare_batch(without)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert with_hook.batch_info.num_segments == 3  # 128 and 72 tokens of slot 1, 60 of the base model
