"""What a converted adapter's files say of its origin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.adapters.random_adapters import write_random_lora

from adapters.errors import AdapterMalformed
from adapters.formats import Limits, read_adapter
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of

SAID = {"from": f"sha256:{'a1' * 32}", "data": "b2" * 32, "agreement": 0.97}


def lora(folder: Path, base: BaseModel, converted: Any) -> Path:
    said = {"positions": "prefill", "converted": converted}
    return write_random_lora(folder / "lora", base, 1, rank=2, config={"prelude": said})


def test_it_is_kept_and_changes_no_revision(base: BaseModel, tmp_path: Path):
    converted, plain = (
        read_adapter(lora(tmp_path / str(n), base, each), base, Limits()) for n, each in enumerate((SAID, None))
    )
    assert converted.warnings == (
        f"converted from sha256:{'a1' * 32} for the prompt only, agreement 0.970, data sha256:{'b2' * 32}",
    )
    assert plain.warnings == ()
    assert revision_id_of(converted) == revision_id_of(plain)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"from": "sha256:\x1b[31m"}, "from is .* a revision id"),
        ({"from": None}, "from is null; it must be a revision id"),
        ({"data": "B2" * 32}, "data is .* 64 lower-case hex digits"),
        ({"agreement": 1.1}, "agreement is 1.1; it must be a number from 0 to 1"),
        ({"agreement": None}, "agreement is null"),
        ({"agreement": "much"}, "agreement is .much.; it must be a finite number"),
    ],
)
def test_strange_ones_are_refused(base: BaseModel, tmp_path: Path, change: dict[str, Any], message: str):
    with pytest.raises(AdapterMalformed, match=message):
        read_adapter(lora(tmp_path, base, SAID | change), base, Limits())
    with pytest.raises(AdapterMalformed, match=r"converted is .*; it must be an object"):
        read_adapter(lora(tmp_path / "list", base, [SAID]), base, Limits())
