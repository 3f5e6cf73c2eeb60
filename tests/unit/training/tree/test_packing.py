"""Packing: nothing is lost, rows are full, and the rows are those of first fit decreasing."""

from __future__ import annotations

import random

import pytest
from support.training.random_documents import random_documents

from training.errors import DocumentInvalid
from training.tree.documents import Branch, Document
from training.tree.packing import assign, pack


def first_fit_decreasing(sizes: list[int], row_tokens: int) -> list[list[int]]:
    """As the books have it."""
    rows: list[list[int]] = []
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        for row in rows:
            if sum(sizes[each] for each in row) + sizes[number] <= row_tokens:
                row.append(number)
                break
        else:
            rows.append([number])
    return rows


@pytest.mark.parametrize("seed", range(30))
def test_rows_are_those_of_first_fit_decreasing(seed: int):
    generator = random.Random(seed)
    row_tokens = generator.choice((128, 256, 1024))
    sizes = [generator.randint(1, row_tokens // generator.choice((1, 4, 16))) for _ in range(generator.randint(0, 80))]
    assert assign(sizes, row_tokens) == first_fit_decreasing(sizes, row_tokens)


@pytest.mark.parametrize("seed", range(10))
def test_every_document_is_in_one_row_whole(seed: int):
    documents = random_documents(seed, 60, slots=3)
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


def test_rows_of_one_length():
    documents = random_documents(1, 60)
    assert {row.num_tokens for row in pack(documents, 512, 512)} == {512}


def test_a_document_longer_than_a_row_is_named():
    documents = [Document((1,) * 120, (Branch(120, (2,) * 9, example=41),))]
    with pytest.raises(DocumentInvalid, match="example 41 has 129 tokens with its answers, more than a row of 128"):
        pack(documents, 128)
    assert len(pack(documents, 256)) == 1


@pytest.mark.parametrize(("row_tokens", "multiple"), [(0, 128), (100, 128), (-128, 128), (256, 192)])
def test_lengths_that_flex_attention_cannot_differentiate_are_refused(row_tokens: int, multiple: int):
    with pytest.raises(ValueError, match="multiple of 128"):
        pack([], row_tokens, multiple)


@pytest.mark.slow
def test_many_documents_pack_fast():
    """The tree of free tokens is looked up in O(log(rows)); scanning rows would take 25 million steps."""
    generator = random.Random(3)
    sizes = [generator.randint(1, 2048) for _ in range(20_000)]
    rows = assign(sizes, 2048)
    assert sorted(number for row in rows for number in row) == list(range(len(sizes)))
    assert len(rows) <= 1 + 11 / 9 * -(-sum(sizes) // 2048)
