"""FlexAttention's path, uncompiled on the CPU, against scaled-dot-product attention under the same mask."""

from types import SimpleNamespace

import pytest
import torch
from support.training.random_documents import random_documents

from training.attention import attention_mask, block_mask, tree_attention
from training.tree.rows import Row


@pytest.mark.slow
@pytest.mark.parametrize("num_key_value_heads", [2, 4])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_both_attentions_compute_the_same(num_key_value_heads: int):
    row = Row.of(random_documents(2, 8), 256)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, row.num_tokens, 16, generator=generator) for heads in (4, *[num_key_value_heads] * 2)
    )
    module = SimpleNamespace(num_key_value_groups=4 // num_key_value_heads, training=False)
    with torch.no_grad():
        flex, plain = (
            tree_attention(module, query, key, value, mask, scaling=0.3)[0]
            for mask in (block_mask(row), attention_mask(row))
        )
    assert flex.shape == (1, row.num_tokens, 4, 16)
    assert (flex - plain).abs().max() < 1e-5
