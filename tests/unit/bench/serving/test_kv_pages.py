"""The benchmark of KV transfers alone, between two real processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.errors import BenchError
from bench.serving import kv_pages
from bench.serving.kv_pages import PLACES, QUICK, Options


def test_transfers_of_every_kind(tmp_path: Path) -> None:
    options = replace(QUICK, page_tokens=(1, 16))
    path = tmp_path / "transfers.json"
    kv_pages.run(options, "kv-pages", path, lambda _line: None)
    written = json.loads(path.read_text())
    assert written["ended"] == "after all transfers"
    kinds = [(row["page_tokens"], row["places"], row["blocks"]) for row in written["rows"]]
    parts = 2 * 24  # K and V of the model's layers
    assert kinds == [(page, places, parts * 64 // page) for page in (1, 16) for places in PLACES]
    assert all(row["ms"] > 0 and row["gb_per_s"] > 0 for row in written["rows"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "--model tiny"),
        ({"page_tokens": (48,)}, "64 tokens are no whole pages of 48"),
        ({"kv_tokens": 64}, "--kv-tokens 64: give at least twice"),
        ({"num_gpus": 2}, "--gpus 2"),
        ({"device": "cuda", "num_gpus": 3}, "--gpus 3"),
    ],
)
def test_what_cannot_be_measured(changes: dict, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        kv_pages.run(replace(QUICK, **changes), "kv-pages", None, print)


def test_the_defaults_can_be_measured() -> None:
    Options().check()
