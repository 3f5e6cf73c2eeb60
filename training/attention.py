"""Attention under a row's mask: FlexAttention on GPUs, scaled-dot-product attention on CPUs.

transformers looks attention up by name, so a model is switched without being edited. FlexAttention has no backward on
CPUs. It gets a `mask_mod` only: its backward makes NaN of a `score_mod` (pytorch#153799), and transformers' own
"flex_attention" always passes one.
"""

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from training.tree.mask import boolean_mask, mask_mod
from training.tree.rows import Row

ATTENTION = "prelude_tree"
_MOST_GRAPHS = 64  # of one process; torch's own limit, 8, is less than a few models need


def attention_mask(row: Row) -> torch.Tensor | BlockMask:
    """The mask of a row for the device that it is on."""
    if row.tokens.device.type == "cpu":
        return boolean_mask(row)
    return block_mask(row)


def block_mask(row: Row) -> BlockMask:
    """The mask for FlexAttention; [num_tokens, num_tokens] bools are in memory while it is made."""
    return create_block_mask(mask_mod(row), 1, 1, row.num_tokens, row.num_tokens, device=row.tokens.device)


@cache
def register() -> None:
    """Make `ATTENTION` known to transformers. Other masks than a row's are handled as its "sdpa" does."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, tree_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    query [1, heads, num_tokens, head_dim] -> [1, num_tokens, heads, head_dim]
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if not isinstance(attention_mask, BlockMask):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    grouped = query.shape[1] != key.shape[1]
    flex = _compiled_flex_attention() if query.is_cuda else flex_attention
    output = flex(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2).contiguous(), None


@cache
def _compiled_flex_attention() -> Any:
    """Compiled it is one kernel; otherwise it has all scores in memory.

    A combination of row length (the first, then any), dtype, head size and gradients or none is a graph. One too many
    is an error (`fullgraph`), where torch would go on uncompiled.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    return torch.compile(flex_attention, fullgraph=True)
