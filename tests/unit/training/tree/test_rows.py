"""Rows and their mask, against a walk through each document's tree."""

import pytest
from support.training.random_documents import random_documents

from training.tree.documents import Document
from training.tree.mask import boolean_mask
from training.tree.rows import Row


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
