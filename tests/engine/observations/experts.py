"""What SGLang's layer of experts computes for one token in an adapter's slot, as `hooks_in_action.py` observes it."""

from __future__ import annotations

from types import SimpleNamespace


def observed() -> dict:
    """By hook: who runs the layer; the output without the adapter, and with it."""
    import torch
    from sglang.srt.layers import activation
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.lora.layers import FusedMoEWithLoRA

    activation.get_exec = lambda: SimpleNamespace(deterministic=SimpleNamespace(rl_on_policy_target=None))
    base = SimpleNamespace(num_experts=2, w13_weight=torch.ones(2, 4, 3), w2_weight=torch.ones(2, 3, 2))
    config = SimpleNamespace(apply_router_weight_on_input=False, activation="silu", gemm1_alpha=None)
    base.forward = lambda x, routes: fused_moe_native.moe_forward_native(base, x, routes, config)
    routes = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32), None

    def run(slot_of, batch_info=None):
        tokens = SimpleNamespace(slot_of=slot_of)
        backend = SimpleNamespace(
            batch_info=batch_info, prelude_experts=tokens, get_batch_info=lambda _layout: batch_info
        )
        layer = SimpleNamespace(
            base_layer=base,
            lora_backend=backend,
            _lora_runner_backend=SimpleNamespace(is_lora=lambda: False),
            gate_up_lora_a_weights=torch.ones(1, 2, 2, 3),
            gate_up_lora_b_weights=torch.ones(1, 2, 4, 1),
            down_lora_a_weights=torch.ones(1, 2, 1, 2),
            down_lora_b_weights=torch.ones(1, 2, 3, 1),
            _get_lora_info=lambda: None,
            _forward_with_lora=lambda *_: "SGLang's kernels",
        )
        made = FusedMoEWithLoRA.forward(layer, torch.ones(1, 3), routes)
        return made if isinstance(made, str) else round(made[0, 0].item(), 3)

    return {
        "experts_without_lora_run_in_their_base_layer": run(None, batch_info="a batch"),
        "experts_are_adapted": [run(None), run(torch.tensor([0]))],
    }
