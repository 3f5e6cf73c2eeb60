"""A prefill/decode pair in bfloat16, through the router: KV that adapters made, read by an engine that has none.

The decode engine has little KV memory: prompts nearly as long as it, and answers that outgrow it. And the same cluster
shows what one trace holds: it records requests that ask for it, which the others do not.

With PRELUDE_TEST_DEVICE=cuda it runs on a GPU, both engines on the same one. A cluster of its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clusters.long_prompts import PAGE_TOKENS, POOL_TOKENS, check_lengths
from support.clusters.running_cluster import CHUNK_TOKENS, ENGINE, RunningCluster, running_cluster, sum_of
from support.engines.bfloat16 import Judge, cases_of, mean_distance, write_adapters
from support.engines.parity import Case, ask_together, random_prompts
from support.engines.running_engine import DEVICE, EXTRA_ARGUMENTS
from support.observability.otlp_receiver import OtlpReceiver, ReceivedSpan, children_of, named, otlp_receiver

NEW_TOKENS = 40
LONG_ANSWER_TOKENS = 160
FIELDS = {"max_tokens": NEW_TOKENS, "echo": True, "logprobs": 1}
WAVE_TOKENS, AT_A_TIME = 12, 24
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "nobody reads this"


@pytest.fixture(scope="module")
def directories(model_dir: Path, tmp_path_factory) -> dict[str, Path]:
    return write_adapters(tmp_path_factory.mktemp("bfloat16"), model_dir)


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as receiver:
        yield receiver


@contextmanager
def pair_of(
    root: Path, model_dir: Path, directories: dict[str, Path], *arguments: str, **sections: Any
) -> Iterator[RunningCluster]:
    """A pair in bfloat16, whose engines have these arguments of SGLang's.

    Decode admits more than will fit, with less than one request's answer in reserve for each.
    """
    more = {"kv_page_tokens": PAGE_TOKENS, "extra_arguments": [*EXTRA_ARGUMENTS, *arguments]}
    reserve = [*more["extra_arguments"], "--num-reserved-decode-tokens", "16"]
    small = {"max_total_tokens": POOL_TOKENS, "extra_arguments": reserve}
    with running_cluster(
        root,
        model_dir,
        directories,
        model={"path": str(model_dir), "name": "demo", "dtype": "bfloat16"},
        engine={**ENGINE, "device": DEVICE, **more},
        workers={"prefill-0": {"role": "prefill"}, "decode-0": {"role": "decode", "engine": small}},
        **sections,
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pair(model_dir: Path, directories: dict[str, Path], collector: OtlpReceiver, tmp_path_factory):
    tracing = {"endpoint": collector.url, "sample_ratio": 0}
    with pair_of(tmp_path_factory.mktemp("pair"), model_dir, directories, tracing=tracing) as cluster:
        yield cluster


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_kv_is_in_pages(pair: RunningCluster, worker: str):
    answer = pair.ask_engine(worker, "GET", "/get_server_info")
    assert (answer.status_code, answer.json()["page_size"]) == (200, PAGE_TOKENS)


def below(span: ReceivedSpan, spans: list[ReceivedSpan]) -> set[str]:
    """Names of all spans beneath one."""
    return {name for child in children_of(span, spans) for name in {child.name} | below(child, spans)}


def test_one_trace_shows_router_agent_and_both_engines(pair: RunningCluster, collector: OtlpReceiver):
    """Before any test has loaded an adapter. Warm-up and health checks leave no traces."""
    body = {"model": "demo", "adapter": "lora", "prompt": SECRET, "max_tokens": 5, "ignore_eos": True, "stream": True}
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
    answer = httpx.post(f"{pair.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert (answer.status_code, answer.headers["x-prelude-trace-id"]) == (200, TRACE_ID)
    assert httpx.post(f"{pair.url}/v1/completions", json={**body, "adapter": None}, timeout=120).status_code == 200

    last = {"POST /v1/completions", "EnsureAdapter", "prefill_transfer_kv_cache", "decode_forward"}
    spans = collector.wait(lambda found: last <= {each.name for each in found} and is_whole(found), 60)
    assert {each.trace_id for each in spans} == {TRACE_ID}
    root = next(each for each in spans if each.parent_id == CALLER_ID)
    assert [each.name for each in children_of(root, spans)] == ["admission", "resolve", "placement", "attempt"]
    ensure, prefill, decode = (named(name, spans) for name in ("ensure adapter", "prefill", "decode"))
    assert {"EnsureAdapter", "load adapter", "fetch", "engine"} <= below(ensure, spans)
    assert {"tokenize", "prefill_forward", "prefill_transfer_kv_cache"} <= below(prefill, spans)
    assert {"tokenize", "decode_transferred", "decode_forward"} <= below(decode, spans)
    assert "decode_loop" not in below(decode, spans)  # one per token
    assert decode.events == ("first token",)
    workers = {each.instance for each in spans if each.service == "sglang"}
    assert workers == {"prefill-0", "decode-0"}
    assert SECRET not in repr(spans)


def is_whole(spans: list[ReceivedSpan]) -> bool:
    """Whether every span's parent has arrived, but for the client's."""
    return {each.parent_id for each in spans} - {each.span_id for each in spans} == {CALLER_ID}


def mixed_cases(directories: dict[str, Path]) -> list[Case]:
    """Prompts within a chunk and over several, under each adapter."""
    names, counts = (None, *directories), (9, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 5)
    prompts = random_prompts(4, *counts * len(names))
    return cases_of(list(zip((name for name in names for _ in counts), prompts, strict=True)), NEW_TOKENS)


def test_parity_mixed(pair: RunningCluster, directories: dict[str, Path], tmp_path: Path):
    cases = mixed_cases(directories)
    known = Judge(pair.model_dir, directories, tmp_path).check(cases, ask_together(pair.url, cases, **FIELDS))
    adapted = [case for case in known if case.adapter is not None and len(case.prompt_ids) > 9]
    unadapted = cases_of([(None, case.prompt_ids) for case in adapted], NEW_TOKENS)
    answers = ask_together(pair.url, unadapted, **FIELDS)
    Judge(pair.model_dir, {}, tmp_path).check(unadapted, answers)
    for case, base in zip(adapted, answers, strict=True):  # the adapters matter: base answers would be far off
        found = base["choices"][0]["logprobs"]["token_logprobs"][1 : len(case.prompt_ids)]
        assert mean_distance(found, case.reference["prompt_logprobs"][1:]) > 0.2, case.name


def test_long_prompts_are_answered_or_refused(pair: RunningCluster):
    check_lengths(pair, "lora", "direft")


def test_retracted_requests_come_back_with_their_own_kv(pair: RunningCluster, directories: dict[str, Path], tmp_path):
    """Decode runs out of KV memory."""
    names = ("lora", None, "direft", "mixed", "loreft", None, "direft", "lora")
    asked = list(zip(names, random_prompts(3, *range(30, 30 + len(names))), strict=True))
    cases = cases_of(asked, LONG_ANSWER_TOKENS)
    answers = ask_together(pair.url, cases, max_tokens=LONG_ANSWER_TOKENS, logprobs=1)
    Judge(pair.model_dir, directories, tmp_path).check(cases, answers)
    retracted = sum_of(pair.ask_engine("decode-0", "GET", "/metrics").text, "sglang:num_retracted_requests_total")
    assert retracted > 0, "nothing was retracted: this proved nothing"
    print(f"{retracted:.0f} retractions")


@pytest.mark.long
def test_parity_while_batches_follow_one_another(pair: RunningCluster, directories: dict[str, Path], tmp_path: Path):
    """Equal prompts in one batch and in the next: one's KV is sent, another's page is freed, a third is computed."""
    names, counts = (None, *directories), (3, 40, CHUNK_TOKENS)
    start, *ends = random_prompts(5, CHUNK_TOKENS // 2, *counts * len(names))
    prompts = list(zip((name for name in names for _ in counts), (start + each for each in ends), strict=True))
    copies = [each for each in prompts for _ in range(2)]  # side by side, and again later
    cases = cases_of(copies * 3, WAVE_TOKENS)
    answers = ask_together(pair.url, cases, AT_A_TIME, max_tokens=WAVE_TOKENS, logprobs=1)
    Judge(pair.model_dir, directories, tmp_path).check(cases, answers)


@pytest.mark.skipif(DEVICE != "cuda", reason="FP8 KV is for the attention kernels of GPUs")
def test_kv_in_fp8(model_dir: Path, directories: dict[str, Path], tmp_path: Path, tmp_path_factory):
    """Half the bytes on the way. Tolerance: that of `test_fp8.py`, for the base model and every adapter alike."""
    cases = mixed_cases(directories)
    with pair_of(tmp_path_factory.mktemp("p"), model_dir, directories, "--kv-cache-dtype", "fp8_e4m3") as pair:
        answers = ask_together(pair.url, cases, **FIELDS)
    judge = Judge(model_dir, directories, tmp_path, mean_tolerance=0.2, largest_tolerance=2.0)
    judge.check(cases, answers)
