"""Bodies of the hooks by which a scheduler shows what it holds and what waits in it."""

from __future__ import annotations

import time

from engine.hooks.state import report


def report_scheduler(result, scheduler):
    """Publish this scheduler's hooks and how many tensors of its model hold adapters."""
    runner = scheduler.tp_worker.model_runner
    this = report()
    this.process = f"scheduler-{scheduler.ps.tp_rank}"
    this.lora_enabled = getattr(runner, "lora_manager", None) is not None
    this.adapter_tensors = count_adapter_tensors(runner)
    this.write()
    return result


_PUBLISH_EVERY_S = 0.05
_published_at = 0.0


def publish_while_waiting(_result, scheduler):
    """Publish the load of a scheduler that has requests but no batch; it turns round many times a millisecond."""
    global _published_at
    now = time.monotonic()
    if now - _published_at >= _PUBLISH_EVERY_S:
        _published_at = now
        scheduler.publish_load_snapshot(force=True)


def count_adapter_tensors(runner) -> int:
    """Tensors that hold adapter weights: SGLang's slot buffers, and LoRA layers wrapped round base layers."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    layers = sum(isinstance(module, BaseLayerWithLoRA) for module in runner.model.modules())
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return layers
    pool = manager.memory_pool
    return layers + sum(len(buffers) for half in (pool.A_buffer, pool.B_buffer) for buffers in half.values())
