"""bfloat16 engines: near the float32 reference, as near as the base model itself, and far from the wrong adapter.

Tolerance: the mean difference of a prompt's log-probabilities from the float32 reference is at most 0.05, the largest
0.6, for the base model and every adapter alike; those of any other adapter differ by more than 0.2 in the mean.
"""

from __future__ import annotations

from pathlib import Path

from adapters.base_model import BaseModel
from adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from cluster.demo import make_model
from tests.engine.running_engine import MODULES, AdapterSlots, engine_spec, running_engine
from tests.engine.test_unified import Unified, tokens

MEAN_TOLERANCE = 0.05
LARGEST_TOLERANCE = 0.6
LEAST_MEAN_OF_ANOTHER = 0.2


def test_parity(tmp_path: Path, tmp_path_factory):
    model = tmp_path / "model"
    make_model(model)
    base = BaseModel.read(model)
    directories = {
        "lora": write_random_lora(tmp_path / "lora", base, 1, dtype="bfloat16"),
        "direft": write_random_reft(tmp_path / "direft", base, 2, rank=8, std=2.0),
        "loreft": write_random_reft(tmp_path / "loreft", base, 3, kind="loreft", std=2.0),
        "mixed": write_random_mixed(tmp_path / "mixed", base, 4),
    }
    spec = engine_spec(
        "unified", model, tmp_path_factory.mktemp("e") / "s", adapters=AdapterSlots(4, 16, MODULES), dtype="bfloat16"
    )
    with running_engine(spec, tmp_path / "cache") as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        unified = Unified(engine, directories, revisions, tmp_path)
        cases = unified.cases([(name, tokens(150, 7)) for name in (None, *directories)])
        for case, answer in zip(cases, unified.ask_together(cases), strict=True):
            found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(case.prompt_ids)]

            def differences(reference: dict, found=found) -> list[float]:
                pairs = zip(found, reference["prompt_logprobs"][1:], strict=True)
                return [abs(a - b) for a, b in pairs]

            own = differences(case.reference)
            mean = sum(own) / len(own)
            print(f"{case.adapter or 'base'}: mean {mean:.4f}, largest {max(own):.4f}")
            assert mean <= MEAN_TOLERANCE, case.adapter
            assert max(own) <= LARGEST_TOLERANCE, case.adapter
            for other in cases:
                if other is not case:
                    wrong = differences(other.reference)
                    assert sum(wrong) / len(wrong) > LEAST_MEAN_OF_ANOTHER, (case.adapter, other.adapter)
