"""Bodies of the hooks that restrict an adapter to its positions.

SGLang applies an adapter to every token of its requests. Here each batch is first split into segments by position
(`engine.adapter_slots.positions`), and SGLang's LoRA manager sees segments instead of requests. A batch without
adapted tokens takes the base model's path, so decode costs what it costs without adapters.
"""

from typing import Any

from engine.adapter_slots.positions import Segment, Span, segments_of
from engine.hooks.packed import fills_of_a_batch
from engine.hooks.reft import begin_batch
from engine.hooks.report import report_lacking

# The batch's segments while SGLang builds a forward batch, which calls the LoRA manager; None in captures and dry runs.
_segments: tuple[Segment, ...] | None = None


def adapter_of(req) -> str | None:
    """The revision of a request, also while it decodes."""
    return getattr(req, "prelude_adapter", None) or req.lora_id


def is_everywhere(manager, adapter: str | None) -> bool:
    """Whether an adapter acts on every position."""
    return _settings_of(manager, adapter).get("positions") == "all"


def _settings_of(manager, adapter: str | None) -> dict[str, Any]:
    """What `adapters.packed.engine_directory` has written for us; empty for an adapter that is not loaded."""
    config = manager.configs.get(adapter)
    return {} if config is None else config.hf_config.get("prelude", {})


# ---- a request's adapter while it decodes ---------------------------------------------------------------------------


def mark_as_prompt_only(manager, req) -> bool:
    """Note on a request that its adapter acts on its prompt only; whether it holds one that does."""
    if req.lora_id is None or is_everywhere(manager, req.lora_id):
        return False
    req.prelude_adapter = req.lora_id
    return True


def drop_adapter_for_decode(manager, req) -> None:
    """Make a decoding request a base-model request, for the scheduler too, so that it holds no slot."""
    if mark_as_prompt_only(manager, req):
        req.lora_id = None


def free_slots_of_decoding(original, scheduler, *args, **kwargs):
    """Drop the adapters of decoding requests before SGLang builds a prefill batch, and restore those of retracted ones.

    A retracted request prefills its prompt again. If its adapter is no longer loaded, it waits until the agent has
    loaded it.
    """
    running = kwargs.get("running_batch") or scheduler.running_batch
    manager = scheduler.tp_worker.model_runner.lora_manager
    for req in running.reqs:
        drop_adapter_for_decode(manager, req)
    retracted = [req for req in scheduler.waiting_queue if req.is_retracted]
    for req in retracted:
        req.lora_id = adapter_of(req)
    report_lacking({req.rid: req.lora_id for req in retracted if not _are_loaded(manager, {req.lora_id})})
    return original(scheduler, *args, **kwargs)


def _are_loaded(manager, adapters: set[str | None]) -> bool:
    return manager.loras.keys() >= adapters - {None}


def num_needing(scheduler, adapter: str) -> int:
    """How many requests need an adapter: those whose prompt is to be read, or is in the batch that may still run.

    An adapter for all positions is needed until its answers end. So is one in memory only: if a request were retracted,
    it might be nowhere any more.
    """
    reading = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    if scheduler.chunked_req is not None:
        reading.append(scheduler.chunked_req)
    if scheduler.last_batch is not None and scheduler.last_batch.forward_mode.is_extend():
        reading += scheduler.last_batch.reqs
    if scheduler.disaggregation_mode.value == "prefill":  # they may be read again until their KV has been sent
        reading += [*scheduler.disagg_prefill_bootstrap_queue.queue, *scheduler.disagg_prefill_inflight_queue]
    settings = _settings_of(scheduler.tp_worker.model_runner.lora_manager, adapter)
    if settings.get("positions") == "all" or settings.get("memory_only"):
        reading += [req for req in scheduler.running_batch.reqs if not req.finished()]
    return len({id(req) for req in reading if adapter_of(req) == adapter})


# ---- a batch's segments ---------------------------------------------------------------------------------------------


def cut_into_segments(original, cls, batch, model_runner, *args, **kwargs):
    """Build the forward batch with `_segments` set for the LoRA manager's hooks."""
    global _segments
    _disable_adapters(model_runner.lora_manager)  # also for batches that SGLang does not prepare LoRA for
    _segments = _segments_of(model_runner.lora_manager, batch)
    try:
        return original(cls, batch, model_runner, *args, **kwargs)
    finally:
        _segments = None


def _segments_of(manager, batch) -> tuple[Segment, ...]:
    mode = batch.forward_mode
    if mode.is_decode():
        for req in batch.reqs:
            drop_adapter_for_decode(manager, req)
        if not any(req.lora_id for req in batch.reqs):  # the common case, in every decode step
            return (Segment(None, len(batch.reqs)),)
        # One token each, behind the prompt; where exactly does not matter.
        bounds = [(len(req.origin_input_ids), len(req.origin_input_ids) + 1) for req in batch.reqs]
    elif mode.is_extend():
        for req in batch.reqs:  # it may be retracted before its first decode step, and read again with its first token
            mark_as_prompt_only(manager, req)
        bounds = [(begin, begin + n) for begin, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
    else:
        return ()
    return segments_of(
        Span(adapter, is_everywhere(manager, adapter), len(req.origin_input_ids), begin, end)
        for req, (begin, end) in zip(batch.reqs, bounds, strict=True)
        for adapter in [adapter_of(req)]
    )


# ---- the LoRA manager sees segments ---------------------------------------------------------------------------------


def fetch_only_adapters_in_use(original, manager, new_loras, running_loras=frozenset()):
    """Fill slots with the adapters of the batch's segments; none for a batch of base tokens."""
    if _segments is not None:
        new_loras = {segment.adapter for segment in _segments}
        if not any(new_loras):
            return None
    with fills_of_a_batch(manager.memory_pool, new_loras):
        return original(manager, new_loras, running_loras)


def prepare_segments(original, manager, forward_batch):
    """Prepare the LoRA backend for the batch's segments; without adapted tokens every layer takes its base path."""
    _disable_adapters(manager)
    adapters = {segment.adapter for segment in _segments or () if segment.adapter is not None}
    manager.prelude_batch_is_adapted = bool(adapters)
    in_graph = manager.can_use_prefill_cuda_graph(forward_batch)  # a graph runs its LoRA kernels in any case
    if _segments is None:  # captures and dry runs
        if forward_batch.forward_mode.is_decode():
            return original(manager, forward_batch) if _is_captured_with_lora() else manager.reset_lora_batch()
        if in_graph:
            begin_batch(manager, forward_batch, forward_batch.lora_ids, in_graph)
        return original(manager, forward_batch)
    if not adapters and not in_graph:
        return manager.reset_lora_batch()
    batch = _SegmentedBatch(forward_batch, _segments)
    if in_graph and not manager.can_use_prefill_cuda_graph(batch):
        raise RuntimeError(f"a prefill graph has no room for a batch of {batch.batch_size} segments")
    begin_batch(manager, batch, batch.lora_ids, in_graph)
    _adapt_experts(manager, batch)
    if not in_graph and not any(has_lora(manager, adapter) for adapter in adapters):
        return manager.reset_lora_batch()
    return original(manager, batch)


def _is_captured_with_lora() -> bool:
    from sglang.srt.model_executor.runner import get_capture_lora_variant

    return get_capture_lora_variant() == "lora"


def _adapt_experts(manager, batch) -> None:
    """Set which tokens of the batch have LoRA on experts."""
    pool = manager.memory_pool
    tokens = getattr(pool, "prelude_experts", None)
    if tokens is None:  # slots have no room for it
        return
    slots = [
        pool.uid_to_buffer_id[adapter] if adapter is not None and manager.loras[adapter].has_experts else -1
        for adapter in batch.lora_ids
    ]
    tokens.begin_batch(slots, batch.extend_seq_lens_cpu)


def _disable_adapters(manager) -> None:
    """Disable ReFT and LoRA on experts for the next batch."""
    manager.memory_pool.prelude_reft.end_batch()
    tokens = getattr(manager.memory_pool, "prelude_experts", None)
    if tokens is not None:
        tokens.end_batch()


def has_lora(manager, adapter: str) -> bool:
    """Whether an adapter has LoRA; ReFT alone changes the residual stream only."""
    return bool(manager.configs[adapter].hf_config.get("target_modules"))


class _SegmentedBatch:
    """A forward batch with segments instead of requests; all other attributes are the batch's."""

    def __init__(self, forward_batch, segments: tuple[Segment, ...]) -> None:
        import torch

        if forward_batch.forward_mode.is_decode():  # decode kernels expect one entry per token
            segments = tuple(Segment(segment.adapter, 1) for segment in segments for _ in range(segment.num_tokens))
        lengths = [segment.num_tokens for segment in segments]
        self._forward_batch = forward_batch
        self.lora_ids = [segment.adapter for segment in segments]
        self.batch_size = len(segments)
        self.extend_seq_lens_cpu = lengths
        self.return_logprob = False  # read for LoRA on lm_head only, and per request
        self.extend_seq_lens = torch.tensor(lengths, dtype=torch.int32)  # on the host, where backends split batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward_batch, name)


def count_the_base_models_slot(original, manager, lora_ids):
    """Count the base model's slot: a batch may need it even if all its requests have adapters.

    Refuse a request whose adapter is not loaded.
    """
    return _are_loaded(manager, set(lora_ids)) and original(manager, set(lora_ids) | {None})


def no_graph_without_its_kernels(original, runner, forward_batch, *args, **kwargs):
    """Run a decode batch with adapted tokens without graph where none has their kernels: under ReFT, with experts."""
    manager = runner.model_runner.lora_manager
    has_kernels = runner.record_nolora_graph and not manager.memory_pool.prelude_reft.is_active
    if manager.prelude_batch_is_adapted and not has_kernels:
        return False
    return original(runner, forward_batch, *args, **kwargs)


# ---- the prefix cache -----------------------------------------------------------------------------------------------


def keep_only_the_prompts_kv(original, cache, req, *, up_to, **kwargs):
    """Do not cache KV of an answer's tokens: decode computed it with base weights, and in the next turn it is prompt.

    Also of a retracted request, which computes its prompt and the answer so far in prefill.
    """
    if getattr(req, "prelude_adapter", None) is not None:  # adapters that act everywhere are never dropped
        up_to = min(up_to, len(req.origin_input_ids))
    return original(cache, req, up_to=up_to, **kwargs)


def match_the_prompt_only(original, req, input_len):
    """End a retracted request's prefix match at its prompt: cached KV of its answer's tokens may be adapted."""
    longest = original(req, input_len)
    if getattr(req, "prelude_adapter", None) is None:
        return longest
    return min(longest, len(req.origin_input_ids))
