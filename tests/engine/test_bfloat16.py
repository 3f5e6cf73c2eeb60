"""bfloat16 engines, as they are on GPUs: near the float32 reference, and far from the wrong adapter.

Tolerance: `tests.engine.bfloat16`. Prompts' log-probabilities under any other adapter differ by more than 0.2 in the
mean, four times what is tolerated.

With PRELUDE_TEST_DEVICE=cuda the same tests run on a GPU: csgmv kernels, CUDA graphs in decode, overlapped scheduling.
On CPUs `make test` has float32 in `test_unified.py`, and bfloat16 in tests/cluster/answers/test_pair_bfloat16.py.
"""

from pathlib import Path

import httpx
import pytest
from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.clusters.running_cluster import sum_of
from support.engines.bfloat16 import Judge, cases_of
from support.engines.model_families import make_family
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS, MODULES, AdapterSlots, engine_spec, running_engine
from support.engines.unified_engine import Unified, tokens

from adapters.model.base_model import BaseModel
from engine.base_models import fitted_to

pytestmark = pytest.mark.long
LEAST_MEAN_OF_ANOTHER = 0.2
NEWER = ("qwen3_vl", "qwen3_vl_moe", "glm4", "glm4_moe", "gemma3_vl", "gpt_oss", "gpt_oss_mxfp4")
NEW_TOKENS = 40
CHUNK = 64  # the engine's


@pytest.fixture(scope="module")
def directories(tmp_path_factory, model: Path) -> dict[str, Path]:
    base, root = BaseModel.read(model), tmp_path_factory.mktemp("adapters")
    return {
        "lora": write_random_lora(root / "lora", base, 1, std=0.2, dtype="bfloat16"),
        "lora-1": write_random_lora(root / "lora-1", base, 2, rank=1, alpha=2, modules=("q_proj", "up_proj"), std=0.6),
        "lora-64": write_random_lora(root / "lora-64", base, 3, rank=64, alpha=64, layers=(0, 2)),
        "direft": write_random_reft(root / "direft", base, 4, rank=8, std=2.0),
        "direft-some": write_random_reft(root / "direft-some", base, 5, rank=1, layers=(1, 3), std=8.0),
        "loreft": write_random_reft(root / "loreft", base, 6, kind="loreft", std=2.0),
        "mixed": write_random_mixed(root / "mixed", base, 7),
        "everywhere": write_random_lora(
            root / "everywhere", base, 8, std=0.15, config={"prelude": {"positions": "all"}}
        ),
        "everywhere-direft": write_random_reft(root / "everywhere-direft", base, 9, positions="all", std=2.0),
    }


@pytest.fixture(scope="module")
def unified(tmp_path_factory, model: Path, directories: dict[str, Path]):
    scratch = tmp_path_factory.mktemp("e") / "s"
    # Fewer slots than adapters.
    spec = engine_spec("unified", model, scratch, adapters=AdapterSlots(6, 64, MODULES), dtype="bfloat16")
    with running_engine(spec, tmp_path_factory.mktemp("cache")) as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        yield Unified(engine, directories, revisions, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def judge(model: Path, directories: dict[str, Path], tmp_path_factory) -> Judge:
    return Judge(model, directories, tmp_path_factory.mktemp("judge"))


def test_parity_mixed(unified: Unified, judge: Judge):
    """Every kind in the same batches, prompts of less than a chunk and of several, then forty tokens of decode."""
    names = (None, *unified.directories)
    prompts = [(name, tokens(count, 10 * n + count)) for n, name in enumerate(names) for count in (20, 2 * CHUNK + 30)]
    cases = cases_of(prompts, NEW_TOKENS)
    judge.check(cases, unified.ask_together(cases))


def test_no_adapter_is_another(unified: Unified, judge: Judge):
    cases = cases_of([(name, tokens(150, 7)) for name in (None, *unified.directories)], new_tokens=1)
    answers = unified.ask_together(cases)
    judge.check(cases, answers)
    for case, means in judge.distances(cases, answers):
        del means[case.adapter]
        assert min(means.values()) > LEAST_MEAN_OF_ANOTHER, (case.adapter, means)


@pytest.mark.parametrize("adapter", ["lora", "direft", "everywhere", None])
def test_next_turn(unified: Unified, judge: Judge, adapter: str | None):
    """The KV that decode wrote with base weights is not reused where it is prompt, hence adapted."""
    first = cases_of([(adapter, tokens(40, 400))], new_tokens=32)
    answer = unified.ask(first[0], echo=False)
    judge.check(first, [answer])
    grown = (*first[0].prompt_ids, *answer["choices"][0]["token_ids"], *tokens(7, 401))
    second = cases_of([(adapter, grown)], NEW_TOKENS)
    answer = unified.ask(second[0], echo=False)
    judge.check(second, [answer])
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    # An overlapped scheduler has begun one step more, which wrote the last token's KV.
    assert cached in ((40,) if adapter in ("lora", "direft") else (40 + 31, 40 + 32))


def test_retracted_requests(tmp_path_factory, model: Path, directories: dict[str, Path], judge: Judge):
    """KV memory runs out while many decode: those that are retracted come back with their own adapters' KV."""
    spec = engine_spec(
        "unified",
        model,
        tmp_path_factory.mktemp("e") / "s",
        adapters=AdapterSlots(6, 64, MODULES),
        dtype="bfloat16",
        max_total_tokens=900,
        extra_arguments=(*EXTRA_ARGUMENTS, "--schedule-conservativeness", "0.0"),
    )
    with running_engine(spec, tmp_path_factory.mktemp("cache")) as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        unified = Unified(engine, directories, revisions, tmp_path_factory.mktemp("reference"))
        names = ("lora", "direft", "mixed", "everywhere", None, "loreft", "lora-1", "lora")
        cases = cases_of([(name, tokens(30 + n, 600 + n)) for n, name in enumerate(names)], new_tokens=160)
        judge.check(cases, unified.ask_together(cases, echo=False, ignore_eos=False))
        metrics = httpx.get(f"{spec.url}/metrics").text
        assert sum_of(metrics, "sglang:num_retracted_requests_total") > 0, "nothing was retracted: this proved nothing"


@pytest.mark.skipif(DEVICE != "cuda", reason="CPU engines have no CUDA graphs")
def test_graphs_run_all_but_decode_under_reft(unified: Unified, judge: Judge):
    def passes(mode: str) -> float:
        return sum(
            float(line.split()[-1])
            for line in httpx.get(f"{unified.engine.spec.url}/metrics").text.splitlines()
            if line.startswith("sglang:cuda_graph_passes_total") and f'mode="{mode}"' in line
        )

    for seed, (adapters, is_in_graph) in enumerate(
        (
            (["lora"], True),
            (["direft"], True),
            (["everywhere"], True),
            ([None, "everywhere", "direft", "everywhere", "lora"], True),
            (["everywhere-direft"], False),
            ([None], True),
        )
    ):
        before = {mode: passes(mode) for mode in ("decode_cuda_graph", "decode_none", "prefill_cuda_graph")}
        cases = cases_of([(name, tokens(50, 900 + 10 * seed + n)) for n, name in enumerate(adapters)], NEW_TOKENS)
        judge.check(cases, unified.ask_together(cases, echo=False))
        during = {mode: passes(mode) - count for mode, count in before.items()}
        assert during["prefill_cuda_graph"] > 0, (adapters, during)
        assert (during["decode_cuda_graph"] > NEW_TOKENS // 2) == is_in_graph, (adapters, during)
        assert (during["decode_none"] > NEW_TOKENS // 2) != is_in_graph, (adapters, during)


@pytest.mark.skipif(
    DEVICE != "cuda", reason="test_model_families.py does it in float32, which GPU engines do not run in"
)
@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        *((family, 1) for family in ("qwen2", "qwen3", "mistral", "qwen3_moe", *NEWER)),
        *((family, 2) for family in ("llama", "qwen3_moe", *NEWER)),
    ],
)
def test_model_families(tmp_path: Path, tmp_path_factory, family: str, ranks: int):
    import torch

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"it takes {ranks} GPUs")
    model = tmp_path / "model"
    make_family(family, model)
    base = BaseModel.read(model)
    modules, mixed = base.slot_modules(), base.slot_modules(("q_proj", "down_proj"))
    directories = {
        "lora": write_random_lora(tmp_path / "lora", base, 1, modules=modules, dtype="bfloat16"),
        "direft": write_random_reft(tmp_path / "direft", base, 2, rank=8, std=2.0),
        "mixed": write_random_mixed(tmp_path / "mixed", base, 3, modules=mixed),
    }
    scratch = tmp_path_factory.mktemp("e") / "s"
    slots = AdapterSlots(2, 16, modules)
    spec = engine_spec("unified", model, scratch, adapters=slots, dtype="bfloat16", tensor_parallel=ranks)
    with running_engine(fitted_to(spec, base), tmp_path / "cache") as engine:
        revisions = {name: engine.load(directory) for name, directory in directories.items()}
        cases = cases_of([(name, tokens(count, 7)) for name in (None, *directories) for count in (9, 150)], NEW_TOKENS)
        answers = Unified(engine, directories, revisions, tmp_path).ask_together(cases)
        Judge(model, directories, tmp_path).check(cases, answers)
