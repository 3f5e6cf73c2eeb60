"""Packing: nothing is lost, and rows are full."""

import pytest
from support.training.random_documents import random_documents

from training.errors import DocumentInvalid
from training.tree.documents import Branch, Document
from training.tree.packing import pack


@pytest.mark.parametrize("seed", range(10))
def test_every_document_is_in_one_row_whole(seed: int):
    documents = random_documents(seed, 60)
    rows = pack(documents, 256)
    assert sorted(branch.example for row in rows for branch in row.answers) == sorted(
        branch.example for document in documents for branch in document.branches
    )
    assert sum(int((row.documents >= 0).sum()) for row in rows) == sum(each.num_tokens for each in documents)
    for row in rows:
        assert row.num_tokens % 128 == 0
        assert row.num_tokens <= 256
        for number in range(int(row.documents.max()) + 1):
            mine = row.documents == number
            examples = {row.answers[branch].example for branch in row.branches[mine].tolist() if branch >= 0}
            [document] = [each for each in documents if set(each.examples) == examples]
            tokens = [*document.trunk, *(token for branch in document.branches for token in branch.tokens)]
            assert row.tokens[mine].tolist() == tokens


def test_rows_are_filled_longest_first():
    sizes = {0: 40, 1: 100, 2: 60, 3: 28, 4: 28}  # by example
    documents = [Document((1,) * (size - 1), (Branch(1, (2,), number),)) for number, size in sizes.items()]
    rows = [[branch.example for branch in row.answers] for row in pack(documents, 128)]
    assert rows == [[1, 3], [2, 0, 4]]


def test_a_document_longer_than_a_row_is_named():
    documents = [Document((1,) * 120, (Branch(120, (2,) * 9, example=41),))]
    with pytest.raises(DocumentInvalid, match="example 41 has 129 tokens with its answers, more than a row of 128"):
        pack(documents, 128)
    assert len(pack(documents, 256)) == 1


@pytest.mark.parametrize(("row_tokens", "multiple"), [(0, 128), (100, 128), (-128, 128), (256, 192)])
def test_lengths_that_flex_attention_cannot_differentiate_are_refused(row_tokens: int, multiple: int):
    with pytest.raises(ValueError, match="multiple of 128"):
        pack([], row_tokens, multiple)
