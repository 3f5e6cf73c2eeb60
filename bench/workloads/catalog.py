"""The named workloads. Their texts say which parameters the source leaves open and we have chosen."""

from bench.workloads.lengths import FixedLengths, PunicaLengths
from bench.workloads.popularity import Popularity
from bench.workloads.workload import Workload

_PUNICA = (
    "Chen et al., Punica: Multi-Tenant LoRA Serving, MLSys 2024; benchmarks/bench_textgen_lora.py of punica-ai/punica"
)
_PIONEER = "Thomas, The 33rd adapter problem, pioneer.ai/blog"
_DATABRICKS = "Fast PEFT Serving at Scale, databricks.com/blog/fast-peft-serving-scale"
_OURS = "ours"

_FEW = Popularity("zipf", alpha=1.44)  # of 16 adapters: 1 / (sum of squared shares) is 4.0

_WORKLOADS = (
    Workload(
        "random",
        "Prompts of random tokens of one length. As --dataset-name random of sglang.bench_serving.",
        _OURS,
        concurrency=16,
        num_requests=256,
    ),
    Workload(
        "punica",
        "Prompt lengths lognormal(0.8, -1, 18) clipped to [1, 2046], prompt + output uniform in [prompt + 2, 2048]; "
        "first come first served with 32 in flight; a warm-up of the same shape. The paper's four adapter "
        "distributions are --lora-request-distribution identical, uniform, zipf with alpha 1 (here the default, over "
        "32 adapters) and distinct (with --adapters 1000, one for each request). `skewed` is the law of its code, each "
        "adapter alpha times the next. The code (bench_textgen.py) draws the total uniformly from 0 to 2047 and raises "
        "it to prompt + 2 where it is less: "
        "1.3 % of its answers have just 2 tokens, of ours 0.05 %, and the means are 1,000 and 1,013. There 3 in 1,000 "
        "prompts are empty.",
        _PUNICA,
        lengths=PunicaLengths(),
        popularity=Popularity("zipf", alpha=1.0),
        num_adapters=32,
        concurrency=32,
        warm_up=32,
    ),
    Workload(
        "pioneer",
        "One cell of the sweep over n = 1..128 adapters (--adapters n), 16 clients, 256 requests. The source's model "
        "is an encoder, so its requests have no output; 256 + 64 tokens are our choice.",
        _PIONEER,
        lengths=FixedLengths(256, 64),
        num_adapters=32,
        concurrency=16,
        num_requests=256,
    ),
    Workload(
        "databricks-prefill",
        "2048 + 128 tokens; 16 adapters under Zipf's law with alpha 1.44, which are as many as 4 equally popular ones "
        "(1 / sum of squared shares). For adapters of rank 32. Lengths, concurrency and this reading of `4 adapters on "
        "average` are our choice.",
        _DATABRICKS,
        lengths=FixedLengths(2048, 128),
        popularity=_FEW,
        lora_rank=32,
        num_adapters=16,
        concurrency=32,
        num_requests=512,
    ),
    Workload(
        "databricks-decode",
        "128 + 1024 tokens; else as databricks-prefill.",
        _DATABRICKS,
        lengths=FixedLengths(128, 1024),
        popularity=_FEW,
        lora_rank=32,
        num_adapters=16,
        concurrency=32,
        num_requests=256,
    ),
    Workload(
        "chat",
        "Conversations of 2 to 6 turns with one of eight system prompts of 300 words, pauses of 2 s on average and "
        "answers of 64 to 256 tokens; 64 adapters under Zipf's law; Poisson arrivals of 4 requests/s.",
        _OURS,
        is_chat=True,
        popularity=Popularity("zipf", alpha=1.0),
        num_adapters=64,
        requests_per_s=4.0,
        turns=4.0,
        num_requests=400,
    ),
)
WORKLOADS = {workload.name: workload for workload in _WORKLOADS}
