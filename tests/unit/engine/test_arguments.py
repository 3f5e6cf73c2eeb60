"""The command line and environment of an engine."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters.configs import config_of

from cluster.agent.engine_spec import engine_spec
from cluster.config.schema import ClusterConfig
from engine.access import EngineTls
from engine.arguments import command, environment
from process.certificates.files import CertificateFiles

CONFIG = ClusterConfig.model_validate({
    "model": {"path": "/m", "name": "demo", "dtype": "float32", "tool_call_parser": "qwen25"},
    "engine": {
        "device": "cpu", "max_total_tokens": 4096, "kv_page_tokens": 1, "extra_arguments": ["--random-seed", "7"],
    },
    "workers": {
        "p": {"role": "prefill", "engine_port": 1, "bootstrap_port": 2},
        "d": {"role": "decode", "engine_port": 3},
        "g": {"role": "prefill", "engine_port": 4, "bootstrap_port": 5, "engine": {"device": "cuda"}},
    },
    "adapter_limits": {"slots": 3, "max_rank": 16, "target_modules": ["q_proj", "v_proj"]},
})  # fmt: skip


def words(name: str) -> list[str]:
    return command(engine_spec(CONFIG, name, Path("/scratch")))


def test_layers_with_a_window_keep_all_kv():
    """SGLang would keep the window's alone, in a pool of its own, by a share of memory that no plan here counts."""
    assert all("--disable-hybrid-swa-memory" in words(name) for name in ("p", "d", "g"))


def test_kv_has_the_pages_of_the_configuration():
    spec = engine_spec(CONFIG, "d", Path("/scratch"))
    assert "--page-size" not in command(spec)  # SGLang chooses
    assert dict(itertools.pairwise(command(replace(spec, kv_page_tokens=64))))["--page-size"] == "64"


@pytest.mark.parametrize(
    ("engine", "pages"),
    [
        ({"device": "cpu"}, {"prefill": 1, "decode": 1, "unified": 1}),
        ({"device": "cuda"}, {"prefill": 64, "decode": 64, "unified": 1}),
        ({"device": "cuda", "kv_page_tokens": 1}, {"prefill": 1, "decode": 1, "unified": 1}),
        ({"device": "cuda", "kv_page_tokens": 16}, {"prefill": 16, "decode": 16, "unified": 16}),
        ({"device": "cuda", "chunked_prefill_tokens": 1000}, {"prefill": 1, "decode": 1, "unified": 1}),
    ],
)
def test_kv_that_moves_between_gpus_has_pages_of_64_tokens_by_default(engine: dict[str, object], pages: dict[str, int]):
    config = config_of({role: role for role in pages}, engine=engine)
    assert {role: engine_spec(config, role, Path("/scratch")).kv_page_tokens for role in pages} == pages


@pytest.mark.parametrize(
    ("role", "device", "expected"),
    [("unified", "cuda", ("4", "8")), ("unified", "cpu", ("0", None)), ("prefill", "cuda", ("0", None))],
)
def test_prompts_wait_for_decode_steps_on_unified_gpus(role: str, device: str, expected: tuple[str, str | None]):
    spec = replace(engine_spec(CONFIG, "p", Path("/scratch")), role=role, device=device)
    given = dict(itertools.pairwise(command(spec)))
    assert (given["--prefill-decode-interval"], given.get("--prefill-decode-interval-min-bs")) == expected


def test_a_small_decode_engine_reserves_less_for_answers():
    def reserved(name: str, tokens: int | None) -> str | None:
        spec = replace(engine_spec(CONFIG, name, Path("/scratch")), max_total_tokens=tokens)
        return dict(itertools.pairwise(command(spec))).get("--num-reserved-decode-tokens")

    found = [reserved("d", tokens) for tokens in (None, 4096, 1024)]
    assert (found, reserved("p", 1024)) == ([None, None, "128"], None)
    paged = replace(engine_spec(CONFIG, "d", Path("/scratch")), max_total_tokens=1024, kv_page_tokens=256)
    assert dict(itertools.pairwise(command(paged)))["--num-reserved-decode-tokens"] == "256"  # a page, at least


def test_experts_run_in_triton_on_gpus_where_lora_may_be_on_them():
    def runner(name: str, rank: int) -> str | None:
        spec = engine_spec(CONFIG, name, Path("/scratch"))
        assert spec.adapters is not None
        arguments = command(replace(spec, adapters=replace(spec.adapters, max_expert_rank=rank)))
        return dict(itertools.pairwise(arguments)).get("--moe-runner-backend")

    assert (runner("g", 4), runner("g", 0), runner("p", 4)) == ("triton", None, None)


def test_ranks_sum_a_layer_before_reft_reads_it():
    fusion_off = "--enforce-disable-flashinfer-allreduce-fusion"
    assert [fusion_off in words(name) for name in ("p", "g", "d")] == [True, True, False]
    stock = replace(engine_spec(CONFIG, "g", Path("/scratch")), role="stock")
    assert fusion_off not in command(stock)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"num_threads": "0"}),
        ('{"device_list": "mlx5_0", "num_threads": "8"}', {"device_list": "mlx5_0", "num_threads": "0"}),
        ("[1]", [1]),  # SGLang refuses it
    ],
)
def test_a_write_of_kv_has_one_endpoint(given: str, expected: object):
    name = "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"
    assert json.loads(environment(engine_spec(CONFIG, "p", Path("/scratch")), {name: given})[name]) == expected


def test_decode_knows_no_adapters():
    assert not [word for word in words("d") if "lora" in word]
    assert "--disaggregation-bootstrap-port" not in words("d")
    # Sharing prefixes among decoded requests would cross adapters.
    assert "--disaggregation-decode-enable-radix-cache" not in words("d")


def test_an_engine_with_tls_takes_clients_of_its_authority_only():
    tls = EngineTls(CertificateFiles(Path("/crt"), Path("/key"), Path("/ca")), call=pytest.fail)
    pairs = set(itertools.pairwise(command(replace(engine_spec(CONFIG, "d", Path("/scratch")), tls=tls))))
    assert {("--ssl-certfile", "/crt"), ("--ssl-keyfile", "/key"), ("--ssl-ca-certs", "/ca")} <= pairs
    assert not [word for word in words("d") if word.startswith("--ssl")]


def test_cpu_settings_are_for_the_cpu_only():
    assert ("--attention-backend", "torch_native") in itertools.pairwise(words("p"))
    assert not {"--attention-backend", "--lora-backend", "--disable-overlap-schedule"} & set(words("g"))
    spec = engine_spec(CONFIG, "p", Path("/scratch"))
    assert environment(spec, {})["OMP_NUM_THREADS"] == "1"
    assert environment(spec, {"OMP_NUM_THREADS": "4"})["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in environment(engine_spec(CONFIG, "g", Path("/scratch")), {})


@pytest.mark.parametrize(
    ("host", "inherited", "listens_on"),
    [
        ("127.0.0.1", {}, "127.0.0.1"),
        ("fd00::1", {}, "fd00::1"),
        ("0.0.0.0", {}, None),  # no address that a peer could connect to
        ("node-1", {}, None),
        ("127.0.0.1", {"HOST_IP": "10.0.0.7"}, None),  # SGLang's own setting stays
        ("127.0.0.1", {"SGLANG_HOST_IP": "10.0.0.7"}, "10.0.0.7"),
    ],
)
def test_kv_handshakes_listen_on_the_workers_address(host: str, inherited: dict[str, str], listens_on: str | None):
    spec = replace(engine_spec(CONFIG, "p", Path("/scratch")), host=host)
    assert environment(spec, inherited).get("SGLANG_HOST_IP") == listens_on
