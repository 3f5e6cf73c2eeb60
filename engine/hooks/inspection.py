"""Bodies of the hooks that publish a scheduler's adapter tensors and its load while requests wait."""

from __future__ import annotations

import time

from engine.hooks.state import report


def report_scheduler(result, scheduler):
    """Report this scheduler's hooks and its number of adapter tensors."""
    runner = scheduler.tp_worker.model_runner
    own = report()
    own.process = f"scheduler-{scheduler.ps.tp_rank}"
    own.lora_enabled = getattr(runner, "lora_manager", None) is not None
    own.adapter_tensors = count_adapter_tensors(runner)
    own.write()
    return result


_PUBLISH_EVERY_S = 0.05  # the idle loop runs many times per millisecond
_published_at = 0.0


def publish_while_waiting(_result, scheduler):
    """Publish the load of a scheduler that has requests but no batch to run."""
    global _published_at
    now = time.monotonic()
    if now - _published_at >= _PUBLISH_EVERY_S:
        _published_at = now
        scheduler.publish_load_snapshot(force=True)


def count_adapter_tensors(runner) -> int:
    """Number of tensors for adapter weights: SGLang's slot buffers and the LoRA layers around base layers."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    layers = sum(isinstance(module, BaseLayerWithLoRA) for module in runner.model.modules())
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return layers
    pool = manager.memory_pool
    return layers + sum(len(buffers) for half in (pool.A_buffer, pool.B_buffer) for buffers in half.values())
