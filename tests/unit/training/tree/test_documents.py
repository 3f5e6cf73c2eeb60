"""Documents and their merging."""

import pytest
from support.training.random_documents import random_documents

from training.errors import DocumentInvalid
from training.tree.documents import Branch, Document, merge


def contexts(documents: list[Document]) -> list[tuple[object, ...]]:
    """What is learned, independent of how it is arranged."""
    return sorted((d.trunk[: b.position], b.tokens, b.example, b.is_chosen) for d in documents for b in d.branches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Document((1, 2), ()), "no answer"),
        (lambda: Document((1, 2), (Branch(2, (), example=7),)), "example 7 has an empty answer"),
        (lambda: Document((), (Branch(0, (3,), example=7),)), "example 7.*at least one token of context"),
        (lambda: Document((1, 2), (Branch(0, (3,)),)), "at least one token of context"),
        (lambda: Document((1, 2), (Branch(3, (3,)),)), "follows 3 tokens of a context of 2"),
    ],
)
def test_a_document_that_teaches_nothing_is_refused(make, message: str):
    with pytest.raises(DocumentInvalid, match=message):
        make()


def test_merged_documents_stay_below_a_limit():
    documents = [Document((1, 2, 3), (Branch(3, (number,) * 4, number),)) for number in range(5)]
    merged = merge(documents, max_tokens=11)
    assert sorted(each.num_tokens for each in merged) == [7, 11, 11]
    assert contexts(merged) == contexts(documents)


@pytest.mark.parametrize("seed", range(20))
def test_merging_changes_nothing_that_is_learned(seed: int):
    documents = random_documents(seed, 40, vocabulary=2, longest=6)  # few contexts, so that many are equal
    merged = merge(documents)
    assert contexts(merged) == contexts(documents)
    assert sum(each.num_tokens for each in merged) < sum(each.num_tokens for each in documents)
    for one in merged:  # nothing is left to join
        for other in merged:
            assert one is other or other.trunk[: len(one.trunk)] != one.trunk
