"""The attention mask of a row: a token attends to itself and to its ancestors in its document's tree.

Padding is a document of its own, whose tokens see each other: a token that sees nothing would become NaN.
"""

from collections.abc import Callable

import torch

from training.tree.rows import NONE, Row

# (batch, head, query, key) -> bool: FlexAttention's `mask_mod`
MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def mask_mod(row: Row) -> MaskMod:
    """The mask as a function of indices into the row."""
    documents, branches, positions, depths = row.documents, row.branches, row.positions, row.depths

    def sees(_batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        in_trunk = (branches[key] == NONE) & (positions[key] < depths[query])
        in_branch = branches[key] == branches[query]
        return (documents[key] == documents[query]) & (key <= query) & (in_trunk | in_branch)

    return sees


def boolean_mask(row: Row) -> torch.Tensor:
    """[1, 1, num_tokens, num_tokens], the same mask for scaled-dot-product attention; True: query sees key."""
    places = torch.arange(row.num_tokens, device=row.tokens.device)
    zero = places.new_zeros(())
    return mask_mod(row)(zero, zero, places[:, None], places[None, :])[None, None]
