"""Body of the hook by which a scheduler process reports what it holds, once its model is loaded."""

from __future__ import annotations

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


def count_adapter_tensors(runner) -> int:
    """Tensors that hold adapter weights: SGLang's slot buffers, and LoRA layers wrapped round base layers."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    layers = sum(isinstance(module, BaseLayerWithLoRA) for module in runner.model.modules())
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return layers
    pool = manager.memory_pool
    return layers + sum(len(buffers) for half in (pool.A_buffer, pool.B_buffer) for buffers in half.values())
