"""A document: a trunk, which is all context, with a branch for each answer.

Serving reads a prompt with the adapter and generates without it. In the next turn of a conversation it reads the
earlier answer again, as prompt and with the adapter. So a conversation is one trunk from which every trained answer
branches off at its place; the same answer is in the trunk once more, where later turns follow. SFT has one branch, DPO
two, a conversation one for each trained turn.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from training.errors import DocumentInvalid


@dataclass(frozen=True, slots=True)
class Branch:
    """An answer that follows the first `position` tokens of its document's trunk."""

    position: int  # from 1 to the trunk's length
    tokens: tuple[int, ...]  # all of them are learned
    example: int = 0  # number of the data row it comes from; the two answers of a pair have the same
    is_chosen: bool = True  # False: the rejected answer of a pair

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))


@dataclass(frozen=True, slots=True)
class Document:
    """A trunk with its branches. Raises DocumentInvalid if nothing can be learned from it."""

    trunk: tuple[int, ...]
    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "trunk", tuple(self.trunk))
        object.__setattr__(self, "branches", tuple(self.branches))
        if not self.branches:
            raise DocumentInvalid("a document has no answer; give it at least one branch")
        for branch in self.branches:
            if not branch.tokens:
                raise DocumentInvalid(f"example {branch.example} has an empty answer; remove it or give it one")
            if not 1 <= branch.position <= len(self.trunk):
                raise DocumentInvalid(
                    f"example {branch.example}: its answer follows {branch.position} tokens of a context of "
                    f"{len(self.trunk)}; an answer needs at least one token of context"
                )

    @property
    def num_tokens(self) -> int:
        return len(self.trunk) + sum(len(branch.tokens) for branch in self.branches)

    @property
    def examples(self) -> tuple[int, ...]:
        """The data rows that it comes from, ascending."""
        return tuple(sorted({branch.example for branch in self.branches}))


def merge(documents: Iterable[Document], max_tokens: int | None = None) -> list[Document]:
    """Join documents whose contexts are equal, or of which one begins with the other.

    So one document per turn becomes one per conversation. No joined document has more than `max_tokens` tokens. The
    order is that of the contexts, not of `documents`.
    """
    merged: list[Document] = []
    # Sorted backwards: a context comes right after those that begin with it.
    for document in sorted(documents, key=lambda each: each.trunk, reverse=True):
        longer = merged[-1] if merged else None
        if longer is not None and _can_join(longer, document, max_tokens):
            merged[-1] = replace(longer, branches=(*document.branches, *longer.branches))
        else:
            merged.append(document)
    return merged[::-1]


def _can_join(longer: Document, document: Document, max_tokens: int | None) -> bool:
    return longer.trunk[: len(document.trunk)] == document.trunk and (
        max_tokens is None or longer.num_tokens + document.num_tokens - len(document.trunk) <= max_tokens
    )
