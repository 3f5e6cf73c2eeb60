"""Adapters of the prompt alone beside those of all positions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.clusters.small_demo import SMALL_DEMO

from bench.errors import BenchError
from bench.training import positions
from cluster.local.trained_demo.adapters import DemoAdapter
from cluster.local.trained_demo.make import make_parts


def row(style: str, chosen: str, exact: float, rank: int = 8) -> dict[str, Any]:
    return {"style": style, "kind": "lora", "rank": rank, "positions": chosen, "exact_match": exact}


def test_each_takes_its_best_rate_and_styles_are_averaged():
    found = [row("shout", "prefill", 0.2), row("shout", "prefill", 0.9), row("yoda", "prefill", 0.5)]
    found += [row("shout", "all", 1.0), row("yoda", "all", 0.75), row("yoda", "all", 0.1)]
    found += [row("shout", "prefill", 0.5, rank=16), row("shout", "all", 0.0, rank=16)]
    eight, sixteen = positions.compared(found)
    assert eight["prefill"] == {"shout": 0.9, "yoda": 0.5}
    assert (eight["prefill_mean"], eight["all_mean"], eight["prefill/all"]) == (0.7, 0.875, 0.8)
    assert (sixteen["rank"], sixteen["prefill/all"]) == (16, None)


@pytest.mark.parametrize(("changed", "message"), [({"kinds": ("loreft",)}, "kind"), ({"styles": ("x",)}, "style")])
def test_what_the_demo_does_not_have_is_refused(changed: dict[str, Any], message: str):
    with pytest.raises(BenchError, match=f"the {message} is "):
        positions.run(replace(positions.Options(), **changed), "", None, print)


@pytest.mark.slow
def test_both_position_sets_are_trained(tmp_path: Path):
    torch.set_num_threads(1)
    few = replace(
        SMALL_DEMO, pretraining=replace(SMALL_DEMO.pretraining, num_steps=2), adapters=SMALL_DEMO.adapters[:1]
    )
    make_parts(tmp_path, few)
    for chosen in ("prefill", "all"):
        found = positions.train(DemoAdapter("shout", "shout", "lora", 0.005, 2, chosen, num_steps=2), tmp_path)
        assert (found["positions"], found["rank"]) == (chosen, 2)
        assert 0.0 <= found["exact_match"] <= 1.0
