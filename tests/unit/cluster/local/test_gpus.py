"""Workers over the GPUs of a host: who gets which, what is refused, and how they are listed."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.adapters.tiny_model import write_model_config
from support.clusters.configs import config_of

from adapters.model.base_model import BaseModel
from cluster.agent.engine_spec import base_weights_of, engine_spec, fitted_spec
from cluster.config.load import dump_cluster_config, load_cluster_config
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError, StartError
from cluster.local import gpus as gpus_module
from cluster.local.gpus import Gpu, HostGpus, lay_out, list_gpus, with_host_gpus
from engine.arguments import command, environment

MEBIBYTES = 143771


def host(count: int) -> HostGpus:
    return HostGpus(tuple(Gpu(index, f"GPU-{index}{index}-ab") for index in range(count)))


def config(workers: dict[str, Any], **engine: Any) -> ClusterConfig:
    return config_of(workers, engine={"device": "cuda", **engine})


def given(laid_out: ClusterConfig) -> dict[str, Any]:
    return {name: worker.gpus for name, worker in laid_out.workers.items()}


P, D, U = {"role": "prefill"}, {"role": "decode"}, {"role": "unified"}


@pytest.mark.parametrize(
    ("workers", "engine", "num_gpus", "expected"),
    [
        ({"p": {**P, "gpus": 2}, "d": {**D, "gpus": 1}}, {}, 4, {"p": (0, 1), "d": (2,)}),
        ({"p": {**P, "gpus": 2}, "d": {**D, "gpus": ["GPU-11"]}}, {}, 3, {"p": (0, 2), "d": (1,)}),  # named first
        ({"p": {**P, "gpus": [1]}, "d": D}, {}, 2, {"p": (1,), "d": (0,)}),  # one has `gpus`: the other gets its own
        ({"p": {**P, "gpus": [3]}, "d": {**D, "tensor_parallel": 2}}, {}, 4, {"p": (3,), "d": (0, 1)}),
        ({"u": {**U, "gpus": [2, 0]}}, {}, 3, {"u": (2, 0)}),  # in its order
        ({"u": {**U, "gpus": 2}}, {"tensor_parallel": 2}, 2, {"u": (0, 1)}),
        ({"u": {**U, "replicas": 2, "tensor_parallel": 2}}, {}, 4, {"u-0": (0, 1), "u-1": (2, 3)}),
        ({"u": {**U, "replicas": 2, "gpus": [3, 1, 0, 2]}}, {}, 4, {"u-0": (3, 1), "u-1": (0, 2)}),
        ({"u": {**U, "gpus": 1}, "c": {**U, "engine": {"device": "cpu"}}}, {}, 1, {"u": (0,), "c": None}),
    ],
)
def test_who_gets_which(workers, engine, num_gpus: int, expected, tmp_path: Path):
    laid_out = lay_out(config(workers, **engine), host(num_gpus))
    assert given(laid_out) == expected
    for name, gpus in expected.items():
        assert laid_out.engine_of(name).tensor_parallel == len(gpus or [0])
    assert given(lay_out(laid_out, host(num_gpus))) == expected  # agents read what the supervisor has laid out
    dump_cluster_config(laid_out, tmp_path / "cluster.yaml")
    assert load_cluster_config(tmp_path / "cluster.yaml").workers == laid_out.workers


@pytest.mark.parametrize(
    ("workers", "available", "words"),
    [
        (
            {"p": {**P, "replicas": 2}, "d": {**D, "replicas": 3, "gpus": 2}},
            host(4),
            ["workers ask for 8 GPUs (prefill 2 x 1, decode 3 x 2); this host has 4 (0, 1, 2, 3)"],
        ),
        ({"u": {**U, "gpus": 1}}, HostGpus((), "nvidia-smi was not found"), ["has none: nvidia-smi was not found"]),
        ({"u": {**U, "gpus": [5]}}, host(2), ["workers.u.gpus: there is no GPU 5; this host has 2 (0, 1)"]),
        ({"u": {**U, "gpus": ["GPU-77"]}}, host(2), ["there is no GPU GPU-77"]),
        (
            {"p": {**P, "gpus": [1]}, "d": {**D, "gpus": ["GPU-11"]}},
            host(2),
            ["workers.d.gpus: GPU 1 is also that of worker p"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(workers, available: HostGpus, words: list[str]):
    with pytest.raises(StartError) as caught:
        lay_out(config(workers), available)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("worker", "engine", "words"),
    [
        ({"gpus": 1}, {"device": "cpu"}, "workers.u.gpus: its engine has `device: cpu`"),
        ({"gpus": 2, "tensor_parallel": 4}, {}, "it gives 2 GPUs, but replicas x tensor_parallel is 1 x 4 = 4"),
        ({"gpus": [0, 1, 2], "replicas": 2}, {}, "it gives 3 GPUs, but replicas x tensor_parallel is 2 x 1 = 2"),
        ({"tensor_parallel": 2, "engine": {"tensor_parallel": 4}}, {}, "u.tensor_parallel is 2, but engine.tensor_p"),
        ({"gpus": [1]}, {"extra_arguments": ["--base-gpu-id", "1"]}, "also has the argument --base-gpu-id"),
        ({"gpus": [0, 0]}, {}, "found [0, 0]"),
        ({"gpus": [-1]}, {}, "found [-1]"),
        ({"gpus": ["first"]}, {}, "by its index or UUID"),
        ({"gpus": 0}, {}, "expected a number of GPUs"),
    ],
)
def test_what_contradicts_itself_is_refused(worker, engine, words: str):
    with pytest.raises(ValueError, match="u") as caught:
        config({"u": {**U, **worker}}, **engine)
    assert words in str(caught.value)


def test_without_gpus_nothing_changes(monkeypatch: pytest.MonkeyPatch):
    """As in 0.1.0: engines see what their agent sees, and nobody asks the driver."""
    monkeypatch.setattr(gpus_module, "list_gpus", lambda _environment: pytest.fail("asked"))
    before = config({"p": P, "d": {**D, "engine": {"extra_arguments": ["--base-gpu-id", "1"]}}})
    assert with_host_gpus(before) is before
    spec = engine_spec(before, "d", Path("/scratch"))
    assert environment(spec, {"CUDA_VISIBLE_DEVICES": "4"})["CUDA_VISIBLE_DEVICES"] == "4"
    assert "CUDA_VISIBLE_DEVICES" not in environment(spec, {})


def test_an_engine_sees_its_own_gpus_first_and_its_peers():
    laid_out = lay_out(
        config({"p": {**P, "gpus": [3, 1]}, "d": {**D, "gpus": 1}, "e": {**D, "gpus": 1}, "u": {**U, "gpus": [5]}}),
        host(6),
    )
    seen = {
        name: environment(engine_spec(laid_out, name, Path("/scratch")), {"CUDA_VISIBLE_DEVICES": "7"})
        for name in laid_out.workers
    }
    visible = {name: variables["CUDA_VISIBLE_DEVICES"] for name, variables in seen.items()}
    assert visible == {"p": "3,1,0,2", "d": "0,1,3", "e": "2,1,3", "u": "5"}
    assert {variables["CUDA_DEVICE_ORDER"] for variables in seen.values()} == {"PCI_BUS_ID"}
    arguments = command(engine_spec(laid_out, "p", Path("/scratch")))
    assert arguments[arguments.index("--tp-size") + 1] == "2"


def test_only_workers_of_the_same_host_share_its_gpus():
    workers = {"p": {**P, "host": "10.0.0.1", "gpus": 1}, "d": {**D, "host": "10.0.0.2", "gpus": 1}}
    laid_out = lay_out(config(workers), host(1), "10.0.0.2")
    assert given(laid_out) == {"p": 1, "d": (0,)}
    assert engine_spec(laid_out, "d", Path("/scratch")).visible_gpus == (0,)


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; print({text!r}); sys.exit({code})")


LISTED = f"""\
0, GPU-aa11-22, {MEBIBYTES}, NVIDIA H200
1, GPU-bb33-44, [N/A], NVIDIA GB10, with a comma
a message of the driver
"""


def test_they_are_listed():
    found = list_gpus({}, printing(LISTED))
    assert found.gpus == (
        Gpu(0, "GPU-aa11-22", "NVIDIA H200", MEBIBYTES * 1024**2),
        Gpu(1, "GPU-bb33-44", "NVIDIA GB10, with a comma", None),
    )


@pytest.mark.parametrize(
    ("variable", "expected"),
    [("1,0", [1, 0]), ("1", [1]), ("GPU-bb", [1]), ("0,9,1", [0]), ("", []), ("-1", []), ("NoDevFiles", [])],
)
def test_cuda_visible_devices_restricts_them(variable: str, expected: list[int]):
    found = list_gpus({"CUDA_VISIBLE_DEVICES": variable}, printing(LISTED))
    assert [gpu.index for gpu in found.gpus] == expected
    with pytest.raises(StartError, match=f"CUDA_VISIBLE_DEVICES={variable} leaves these of 2"):
        lay_out(config({"u": {**U, "gpus": 3}}), found)


def test_a_host_without_a_driver_has_none():
    assert list_gpus({}, ("no-such-program",)).gpus == ()
    assert list_gpus({}, printing("No devices were found", 6)).gpus == ()


def test_a_broken_driver_is_named(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StartError, match="failed: Driver/library version mismatch"):
        list_gpus({}, printing("Driver/library version mismatch", 18))
    monkeypatch.setattr(gpus_module, "_TIMEOUT_S", 0.3)
    began_at = time.monotonic()
    with pytest.raises(StartError, match="did not end within"):
        list_gpus({}, (sys.executable, "-c", "import time; time.sleep(60)"))
    assert time.monotonic() - began_at < 20


def replicas(text: str, tmp_path: Path) -> ClusterConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text("model: {path: m, name: demo}\n" + text)
    return load_cluster_config(path)


def test_replicas_are_workers_of_their_own(tmp_path: Path):
    found = replicas(
        "engine: {device: cpu}\nworkers:\n  p: {role: prefill, replicas: 3, control_port: 7100, bootstrap_port: 7200, "
        "engine: {max_running_requests: 5}}\n  d: {role: decode, replicas: 1}\n",
        tmp_path,
    )
    assert list(found.workers) == ["p-0", "p-1", "p-2", "d"]
    ports = [(worker.control_port, worker.bootstrap_port, worker.engine_port) for worker in found.workers.values()]
    assert ports == [(7100, 7200, 0), (7101, 7201, 0), (7102, 7202, 0), (0, 0, 0)]
    assert found.engine_of("p-2").max_running_requests == 5
    dump_cluster_config(found, tmp_path / "again.yaml")
    assert load_cluster_config(tmp_path / "again.yaml") == found
    assert yaml.safe_load((tmp_path / "again.yaml").read_text())["workers"].keys() == found.workers.keys()


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ("  u: {role: unified, replicas: 2}\n  u-1: {role: unified}\n", "workers.u.replicas: there is another worker"),
        (
            "  u: {role: unified, replicas: 2, engine_port: 65535}\n",
            "workers.u.engine_port: replica 1 would have 65536",
        ),
        ("  u: {role: unified, replicas: 2, engine_port: 7000, control_port: 7001}\n", "7001, and so is workers.u-"),
        (f"  {'u' * 62}: {{role: unified, replicas: 2}}\n", "is over 63 characters"),
        ("  u: {role: unified, replicas: 1000000000}\n", "workers.u.replicas"),
    ],
)
def test_bad_replicas_are_refused(workers: str, words: str, tmp_path: Path):
    with pytest.raises(Exception, match=r"replicas|port") as caught:
        replicas(f"workers:\n{workers}", tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "given", [["--dtype", "float16"], ["--dtype=half"], ["--dt", "half"], ["--model", "other"], ["--model-path=other"]]
)
def test_what_peers_are_told_is_not_among_the_arguments(given: list[str]):
    found = config({"p": P, "d": {**D, "engine": {"extra_arguments": given}}})
    engine_spec(found, "p", Path("/scratch"))
    with pytest.raises(ConfigError, match=r"worker d: its engine's arguments have --(dtype|model-path); give model\."):
        engine_spec(found, "d", Path("/scratch"))


def test_what_replaces_config_json_is_part_of_the_model(tmp_path: Path):
    model = write_model_config(tmp_path)
    options = (["--json-model-override-args", "{}"], ["--json-model-override-args={}"], [], ["--load-format", "dummy"])
    digests = []
    for given in options:
        found = config_of({"p": P, "d": D}, model, engine={"extra_arguments": given})
        digests.append(base_weights_of(engine_spec(found, "p", tmp_path)))
    assert digests[0] == digests[1] != digests[2] == digests[3]


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("Qwen3VLForConditionalGeneration", {"language_model_only": True}), ("GptOssForCausalLM", {"dtype": None})],
)
def test_fields_in_the_place_of_those_of_config_json(tmp_path: Path, architecture: str, overrides: dict[str, object]):
    """In every role: a vision tower is left out, and a dtype that would be used beside the engine's."""
    write_model_config(tmp_path)
    text = BaseModel.read(tmp_path)
    base = replace(text, architecture=architecture)
    found = config({"p": P, "d": D, "u": U})
    for name in found.workers:
        arguments = command(fitted_spec(found, name, tmp_path, base))
        place = arguments.index("--json-model-override-args")
        assert json.loads(arguments[place + 1]) == overrides
        assert "--json-model-override-args" not in command(fitted_spec(found, name, tmp_path, text))
    given = config({"p": P, "d": D}, extra_arguments=["--json-model-override-args={}"])
    with pytest.raises(ConfigError, match=rf"worker p: .*which Prelude gives .*{architecture}.*config\.json instead"):
        fitted_spec(given, "p", tmp_path, base)


def test_arguments_of_a_worker_are_added_to_those_of_the_cluster():
    found = config({"p": {**P, "engine": {"extra_arguments": ["--b"]}}, "d": D, "u": U}, extra_arguments=["--a"])
    arguments = {name: command(engine_spec(found, name, Path("/scratch"))) for name in found.workers}
    assert arguments["p"][-2:] == ["--a", "--b"]
    assert arguments["d"][-1:] == arguments["u"][-1:] == ["--a"]
