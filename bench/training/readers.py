"""The model passes of each layout: Prelude's trees, FlashAttention over packed sequences, padded batches, peft."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from training.adapted_model import AdaptedModel
from training.attention import ATTENTION, attention_mask, register
from training.scores import TargetScores, score_targets
from training.trainable.adapter import TrainableAdapter
from training.tree.rows import Row

_PACKED = "bench_packed_sequences"  # transformers looks for a kernel package if a name has "flash" in it


class PackedFlash:
    """FlashAttention, as torch has it, over sequences that stand one after another in a row. On GPUs only."""

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(_PACKED, self._attend)
        AttentionMaskInterface.register(_PACKED, sdpa_mask)
        model.set_attn_implementation(_PACKED)

    def inputs(self, row: Row) -> dict[str, Any]:
        """Of a row on its device whose documents have one answer each."""
        is_first = torch.ones_like(row.documents, dtype=torch.bool)
        is_first[1:] = row.documents[1:] != row.documents[:-1]
        starts = [*is_first.nonzero().flatten().tolist(), row.num_tokens]
        self._longest = max(end - start for start, end in pairwise(starts))
        self._starts = torch.tensor(starts, dtype=torch.int32, device=row.tokens.device)
        nothing = row.target_mask[None, None, None, :1]  # transformers makes no mask if it gets one of four dimensions
        return {"input_ids": row.tokens[None], "position_ids": row.positions[None], "attention_mask": nothing}

    def _attend(
        self,
        _module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        _mask: Any,
        scaling: float | None = None,
        **_options: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, head_dim]"""
        attend = torch.ops.aten._flash_attention_forward
        q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
        starts, longest = self._starts, self._longest
        return attend(q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scaling)[0][None], None


class FlashModel(AdaptedModel):
    """Our adapters under FlashAttention, for rows whose documents have one answer each."""

    def __init__(self, model: Any, adapters: list[TrainableAdapter], checkpointing: bool = False) -> None:
        super().__init__(model, adapters, checkpointing)
        self._flash = PackedFlash(model)

    def inputs(self, row: Row) -> dict[str, Any]:
        return self._flash.inputs(row)


class PaddedModel(AdaptedModel):
    """Our adapters over padded batches: rows of sequences of one length, with one answer each."""

    def inputs(self, row: Row) -> dict[str, Any]:
        tokens = row.tokens.view(len(row.answers), -1)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        return {"input_ids": tokens, "position_ids": positions, "attention_mask": None}


class PeftModel:
    """peft's own LoRA on all tokens, over packed rows; everything else is as ours is."""

    def __init__(self, model: Any, rank: int, modules: tuple[str, ...], checkpointing: bool) -> None:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=rank, lora_alpha=32, lora_dropout=0.0, target_modules=list(modules))
        self._before = model.config._attn_implementation
        # With weights of the model's dtype, which is peft's fastest: no casts from and to float32.
        self._wrapped = get_peft_model(model, config, autocast_adapter_dtype=False)
        self._model = model
        if model.device.type == "cuda":
            self._inputs = PackedFlash(model).inputs
        else:
            register()
            model.set_attn_implementation(ATTENTION)
            self._inputs = _masked
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        model.train(checkpointing)

    def detach(self) -> None:
        self._model.gradient_checkpointing_disable()
        self._model.eval()
        self._wrapped.unload()
        self._model.set_attn_implementation(self._before)

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        return (each for each in self._wrapped.parameters() if each.requires_grad)

    def score(self, row: Row) -> TargetScores:
        row = row.to(self._model.device)
        states = self._model.model(**self._inputs(row), use_cache=False).last_hidden_state.flatten(0, 1)
        return score_targets(states, self._model.get_output_embeddings(), row)


def _masked(row: Row) -> dict[str, Any]:
    mask = attention_mask(row)
    return {"input_ids": row.tokens[None], "position_ids": row.positions[None], "attention_mask": mask}


Reader = AdaptedModel | PeftModel


@contextmanager
def reader(name: str, model: Any, adapter: TrainableAdapter, checkpointing: bool) -> Iterator[Reader]:
    """The reader of a layout attached to the model: "shared", "paired", "padded", "sft" or "sft-peft"."""
    paired = FlashModel if model.device.type == "cuda" else AdaptedModel
    kinds: dict[str, Any] = {"shared": AdaptedModel, "paired": paired, "padded": PaddedModel, "sft": AdaptedModel}
    if name == "sft-peft":
        modules = adapter.spec.modules_of(adapter.base)
        make = partial(PeftModel, model, adapter.spec.rank, modules, checkpointing)
    else:
        make = partial(kinds[name], model, [adapter], checkpointing)
    found = make()
    try:
        yield found
    finally:
        for parameter in found.parameters():
            parameter.grad = None
        found.detach()
