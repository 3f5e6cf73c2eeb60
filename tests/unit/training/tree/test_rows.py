"""Rows and their mask, against a walk through each document's tree."""

from __future__ import annotations

import pytest
from support.training.random_documents import random_documents

from training.tree.documents import Branch, Document
from training.tree.mask import boolean_mask
from training.tree.rows import NONE, Row

EXAMPLE = [
    Document((10, 11, 12, 13), (Branch(2, (20, 21), 0), Branch(4, (30,), 1)), slot=2),
    Document((40,), (Branch(1, (50, 51), 2),), slot=0, positions="all"),
]


def paths(documents: list[Document]) -> list[list[int]]:
    """For each token of a row, the places of what it sees: its ancestors in its tree, and itself."""
    seen: list[list[int]] = []
    for document in documents:
        begin = len(seen)
        for place in range(len(document.trunk)):
            seen.append([begin + each for each in range(place + 1)])
        for branch in document.branches:
            path = [begin + each for each in range(branch.position)]
            for _ in branch.tokens:
                path = [*path, len(seen)]
                seen.append(path)
    return seen


def test_a_small_row():
    row = Row.of(EXAMPLE, multiple=4)
    assert row.tokens.tolist() == [10, 11, 12, 13, 20, 21, 30, 40, 50, 51, 0, 0]
    assert row.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 0, 1, 2, 0, 1]
    assert row.documents.tolist() == [0] * 7 + [1] * 3 + [NONE] * 2
    assert row.branches.tolist() == [-1, -1, -1, -1, 0, 0, 1, -1, 2, 2, -1, -1]
    assert row.slots.tolist() == [2, 2, 2, 2, -1, -1, -1, 0, 0, 0, -1, -1]
    assert row.target_mask.tolist() == [False] * 4 + [True] * 3 + [False, True, True] + [False] * 2
    assert row.targets.tolist() == [4, 5, 6, 8, 9]
    assert row.predictors.tolist() == [1, 4, 3, 7, 8]
    assert row.target_tokens.tolist() == [20, 21, 30, 50, 51]
    assert row.target_branches.tolist() == [0, 0, 1, 2, 2]
    assert row.adapted.tolist() == [7, 8, 9, 0, 1, 2, 3]
    assert row.num_adapted == (3, 0, 4)
    assert [branch.example for branch in row.answers] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(20))
def test_the_mask_is_the_ancestors_of_each_token(seed: int):
    documents = random_documents(seed, 6)
    row, expected = Row.of(documents), paths(documents)
    mask = boolean_mask(row)
    assert mask.shape == (1, 1, row.num_tokens, row.num_tokens)
    for place, visible in enumerate(expected):
        assert mask[0, 0, place].nonzero().flatten().tolist() == visible
    for place, visible in enumerate(expected):
        assert row.positions[place] == len(visible) - 1
    for target, predictor in zip(row.targets.tolist(), row.predictors.tolist(), strict=True):
        assert expected[target][:-1] == expected[predictor]
    # Padding sees something, so that softmax is defined, and nothing sees it.
    assert mask[0, 0].any(dim=1).all()
    assert not mask[0, 0, : len(expected), len(expected) :].any()
