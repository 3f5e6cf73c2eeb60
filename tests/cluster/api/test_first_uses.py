"""No field, kind of request or kind of adapter is slow the first time: engines compile and load nothing lazily."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.clusters.first_uses import measure_first_uses
from support.clusters.running_cluster import running_cluster

from adapters.model.base_model import BaseModel
from samples.random_adapters import write_random_lora, write_random_reft

LAYOUTS = {
    "pair": {"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode"}},
    "unified": {"unified-0": {"role": "unified"}},
}


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_uses_are_as_fast_as_second_ones(
    layout: str, model_dir: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    named = dict(adapters)
    if layout == "unified":
        base = BaseModel.read(model_dir)
        named["everywhere"] = write_random_lora(tmp_path / "lora", base, 30, config={"prelude": {"positions": "all"}})
        named["everywhere-reft"] = write_random_reft(tmp_path / "reft", base, 31, positions="all")
    with running_cluster(tmp_path, model_dir, named, workers=LAYOUTS[layout]) as fresh:
        uses = measure_first_uses(fresh.url, named)
    for use in sorted(uses, key=lambda use: -use.first_s):
        print(f"{use.first_s:7.3f} s, then {use.second_s:.3f} s: {use.name}")
    assert not [use for use in uses if use.is_slow]
