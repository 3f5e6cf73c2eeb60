"""Bodies of the hooks that run ReFT on SGLang's LoRA registry, slots and batches."""


def add_reft_to_layers(manager) -> None:
    """Create the ReFT pool and add its change to the residual stream after every decoder layer."""
    from engine.adapter_slots.reft import ReftPool

    model = getattr(manager.base_model, "language_model", manager.base_model)
    layers = model.model.layers
    pool = manager.memory_pool
    pool.prelude_reft = ReftPool(
        num_slots=manager.max_loras_per_batch,
        num_layers=len(layers),
        max_rank=manager.max_lora_rank,
        hidden=manager.base_hf_config.hidden_size,
        dtype=manager.dtype,
        device=manager.device,
        backend=_another_backend(manager),
    )
    for number, layer in enumerate(layers):
        layer.register_forward_hook(_layer_hook(pool.prelude_reft, number))


def _another_backend(manager):
    """A second instance of the manager's LoRA backend, with separate batch state."""
    from sglang.srt.runtime_context import get_server_args

    return type(manager.lora_backend)(
        max_loras_per_batch=manager.max_loras_per_batch, device=manager.device, server_args=get_server_args()
    )


def _layer_hook(reft, number: int):
    """The forward hook of decoder layer `number`, whose output is what the next layer adds to the residual stream.

    Gemma's layers return it with the stream so far, and have no `residual_stream`.
    """

    def hook(_layer, args, output):
        if not reft.is_active:
            return None
        if isinstance(output, tuple):
            reft.apply(number, *output)
            return None
        from sglang.srt.layers.layer_boundary.residual import batch

        forward_batch = next(each for each in args if hasattr(each, "residual_stream"))
        hidden = batch.complete_output(output, forward_batch)  # with what ranks have not summed yet
        stream = batch.stream_of(forward_batch)
        reft.apply(number, hidden, None if stream.pending is None else stream.residual)
        return hidden

    return hook


def allow_segments_in_graphs(original, manager, max_num_tokens: int, max_num_requests: int | None = None) -> None:
    """Prepare LoRA and ReFT for the capture of prefill CUDA graphs: for as many segments as tokens.

    SGLang would have room for as many as a batch has requests. A batch with more would run in a graph on what the batch
    before it has left there.
    """
    original(manager, max_num_tokens=max_num_tokens)
    manager.memory_pool.prelude_reft.allow_graphs(max_num_tokens)


def begin_batch(manager, batch, adapters: list[str | None], in_graph: bool) -> None:
    """Set the adapter of each segment of the next batch.

    If there is any adapter, all of them and the base model are in slots by now; a batch of base tokens has no slots.
    """
    pool = manager.memory_pool
    slots = [pool.uid_to_buffer_id[adapter] for adapter in adapters] if any(adapters) else None
    pool.prelude_reft.begin_batch(batch, slots, batch.extend_seq_lens_cpu, in_graph)
