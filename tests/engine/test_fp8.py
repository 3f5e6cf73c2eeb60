"""FP8 engines: base weights and KV cache quantized by SGLang, adapters in bfloat16. They run on GPUs only.

Quantization itself moves answers, so the tolerance is wider than that of bfloat16, for the base model and every adapter
alike: log-probabilities of prompts and of answers of 40 tokens differ from the float32 reference by at most 0.2 in the
mean and 2 at most. And those of a prompt are far closer to its own adapter's reference than to any other's.
"""

from pathlib import Path

import pytest
from support.engines.bfloat16 import Judge, cases_of, write_adapters
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS, MODULES, AdapterSlots, engine_spec, running_engine
from support.engines.unified_engine import Unified, tokens

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="it is about the FP8 kernels of GPUs")

MEAN_TOLERANCE, LARGEST_TOLERANCE = 0.2, 2.0  # seen on an H100: 0.14 and 0.59; with FP8 KV 0.16 and 1.2
NEAREST = 0.5  # of the difference from any other adapter's reference, at most
NEW_TOKENS = 40
QUANTIZATIONS = {
    "weights": ("--quantization", "fp8"),
    "weights-and-kv": ("--quantization", "fp8", "--kv-cache-dtype", "fp8_e4m3"),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory, model: Path) -> dict[str, Path]:
    return write_adapters(tmp_path_factory.mktemp("adapters"), model)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_parity_mixed(quantization: str, tmp_path_factory, model: Path, directories: dict[str, Path]):
    spec = engine_spec(
        "unified",
        model,
        tmp_path_factory.mktemp("e") / "s",
        adapters=AdapterSlots(2, 64, MODULES),  # fewer than adapters
        dtype="bfloat16",
        extra_arguments=(*EXTRA_ARGUMENTS, *QUANTIZATIONS[quantization]),
    )
    folder = tmp_path_factory.mktemp("judge")
    judge = Judge(model, directories, folder, mean_tolerance=MEAN_TOLERANCE, largest_tolerance=LARGEST_TOLERANCE)
    names = (None, *directories)
    with running_engine(spec, tmp_path_factory.mktemp("cache")) as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        unified = Unified(engine, directories, revisions, folder)
        mixed = cases_of([(name, tokens(count, 7)) for name in names for count in (20, 158)], NEW_TOKENS)
        judge.check(mixed, unified.ask_together(mixed))
        same = cases_of([(name, tokens(150, 9)) for name in names], new_tokens=1)
        answers = unified.ask_together(same)
    for case, means in judge.distances(same, answers):
        own = means.pop(case.adapter)
        print(f"{quantization} {case.adapter}: own {own:.4f}, nearest other {min(means.values()):.4f}")
        assert own < NEAREST * min(means.values()), (case.adapter, own, means)
