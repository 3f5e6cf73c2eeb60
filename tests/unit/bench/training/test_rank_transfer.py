"""The sweep of learning rates: what it learns on, and how it finds the best."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from bench.training import rank_transfer
from bench.training.rank_transfer import Options, Task


def rows(kind: str, best: dict[int, float], is_scaled: bool) -> list[dict]:
    """Losses that are parabolas over the logarithm of the learning rate."""
    return [
        {
            "kind": kind,
            "rank": rank,
            "is_scaled": is_scaled,
            "seed": 0,
            "learning_rate": 2.0**exponent,
            "loss": math.exp(0.1 * (exponent - lowest) ** 2) if exponent < -2 else None,
        }
        for rank, lowest in best.items()
        for exponent in range(-12, -1)
    ]


def test_the_best_rate_is_found_between_the_grids_points():
    found = rows("lora", {1: -7.0, 4: -6.75, 32: -7.25}, True) + rows("lora", {1: -4.0, 32: -9.0}, False)
    scaled, fixed = rank_transfer.best_rates(found, untrained_loss=3.0)
    assert (scaled["is_scaled"], fixed["is_scaled"]) == (True, False)
    assert scaled["log2_rates"] == {"1": -7.0, "4": -6.75, "32": -7.25}
    assert (scaled["octaves_apart"], fixed["octaves_apart"]) == (0.5, 5.0)


def test_a_rank_that_has_not_learned_does_not_count():
    found = rows("direft", {1: -3.0, 4: -7.0, 32: -7.5}, True)
    for row in found:
        if row["rank"] == 1 and row["loss"] is not None:
            row["loss"] += 0.6
    [scaled, _] = rank_transfer.best_rates(found + rows("direft", {1: -7.0}, False), untrained_loss=3.0)
    assert scaled["learned"] == {"1": False, "4": True, "32": True}
    assert scaled["octaves_apart"] == 0.5
    [undecided, _] = rank_transfer.best_rates(found + rows("direft", {1: -7.0}, False), untrained_loss=1.0)
    assert (undecided["learned"]["32"], undecided["octaves_apart"]) == (False, None)


@pytest.mark.slow
def test_the_model_is_pretrained_and_adapters_learn(tmp_path: Path):
    torch.set_num_threads(1)
    losses = rank_transfer.pretrain(Options(pretraining_steps=2), tmp_path)
    assert losses["steps"] == 2
    untrained, trained = (
        rank_transfer.train(Task("lora", 4, rate, True, 0), num_steps=4, batch_size=8, folder=tmp_path)
        for rate in (1e-9, 0.02)
    )
    assert trained["loss"] < untrained["loss"]


@pytest.mark.slow
def test_a_run_whose_loss_is_not_finite_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.set_num_threads(1)
    rank_transfer.pretrain(Options(pretraining_steps=1), tmp_path)
    monkeypatch.setattr(rank_transfer, "_train_steps", lambda *_arguments: math.nan)
    assert rank_transfer.train(Task("lora", 1, 1.0, True, 0), 1, 1, tmp_path)["loss"] is None


def test_one_shift_is_learned_whatever_the_topic():
    topics: set[int] = set()
    shifts: set[int] = set()
    for document in rank_transfer.topic_documents(64, seed=3):
        letters = document.trunk[1:-1]
        topics.add(document.trunk[0])
        shifts |= {(b - a) % 24 for a, b in zip(letters, document.branches[0].tokens, strict=True)}
    assert (len(topics), len(shifts)) == (8, 1)
    assert shifts != {0}


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    best = {1: -7.0, 8: -6.0}
    document = {"rows": [*rows("lora", best, True), *rows("lora", best, False)]}
    rank_transfer.draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
