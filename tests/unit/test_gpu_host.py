"""What `make serve` installs and serves where there are GPUs, as far as that shows without one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.config.load import load_cluster_config
from cluster.errors import ConfigError, StartError
from cluster.local import demo
from cluster.local.gpus import Gpu, HostGpus, lay_out
from engine.pin import SGLANG_VERSION

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("#", "    --hash="))]
    matched = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+) \\", line) for line in lines]
    assert all(matched), [line for line, match in zip(lines, matched, strict=True) if not match]
    found = {match[1].lower().replace("_", "-"): match[2] for match in matched if match}
    assert len(found) == len(lines)
    return found


def test_the_gpu_build_is_the_cpu_build_with_other_kernels():
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    assert gpu["sglang"] == SGLANG_VERSION
    assert {name: gpu.get(name) for name in cpu if name != "triton"} == {
        name: version for name, version in cpu.items() if name != "triton"
    }
    # What torch 2.14.1 and SGLang 0.5.23 name exactly in their metadata.
    exact = {"torch": "2.14.1", "torchaudio": "2.11.0", "triton": "3.8.0", "cuda-toolkit": "13.0.3.0"}
    exact |= {"nvidia-cudnn-cu13": "9.24.0.43", "nvidia-nccl-cu13": "2.30.7", "nvidia-nvshmem-cu13": "3.4.5"}
    exact |= {"nvidia-cusparselt-cu13": "0.8.1", "sglang-kernel": "0.4.10", "flashinfer-python": "0.7.2"}
    assert {name: gpu.get(name) for name in exact} == exact


@pytest.mark.parametrize(
    ("listed", "words", "environment", "device"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", [], ".venv-gpu", "cuda"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)", ["DEVICE=cpu"], ".venv", "cpu"),
        ("No devices found.", [], ".venv", "cpu"),
        (None, [], ".venv", "cpu"),
        (None, ["DEVICE=cuda"], ".venv-gpu", "cuda"),
    ],
)
def test_make_serve_sees_the_gpus(tmp_path: Path, listed: str | None, words: list[str], environment: str, device: str):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + ("exit 9\n" if listed is None else f"echo '{listed}'\n"))
    smi.chmod(0o755)
    path = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    path["PATH"] = f"{tmp_path}:{path['PATH']}"
    shown = subprocess.run(
        ["make", "--dry-run", "serve", *words], cwd=ROOT, env=path, capture_output=True, text=True, check=True
    ).stdout
    folder = ".prelude/demo-gpu" if device == "cuda" else ".prelude/demo"
    assert f"{environment}/bin/prelude demo {folder} --device {device} " in shown
    assert shown.endswith(f"exec {environment}/bin/prelude up --config {folder}/cluster.yaml\n")


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_the_demo_on_gpus(tmp_path: Path, num_gpus: int):
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(demo.demo_config(num_gpus)))
    config = load_cluster_config(path)
    assert config.engine.device == "cuda"
    if num_gpus == 1:  # both see it, and share it
        assert {worker.gpus for worker in config.workers.values()} == {None}
        return
    available = HostGpus(tuple(Gpu(number, f"GPU-{number}") for number in range(num_gpus)))
    laid_out = lay_out(config, available)
    assert [worker.gpus for worker in laid_out.workers.values()] == [(0,), (1,)]


def test_the_demo_on_gpus_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(demo, "list_gpus", lambda _environment: HostGpus((), "the driver is not loaded"))
    with pytest.raises(StartError, match=r"no GPU was found \(the driver is not loaded\); `make DEVICE=cpu serve`"):
        demo.make_toy(tmp_path / "demo", "cuda")
    with pytest.raises(StartError, match="no GPU was found"):
        demo.make_demo(tmp_path / "demo", tmp_path / "model.gguf", device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_the_demo_takes_no_folder_that_has_files(tmp_path: Path):
    mine = tmp_path / "thesis.tex"
    mine.write_text("years of work")
    with pytest.raises(ConfigError, match=rf"{tmp_path} has files that are no demo; name a folder that is not there"):
        demo.make_toy(tmp_path)
    assert mine.read_text() == "years of work"
    for folder in (Path("/proc/demo"), mine):
        with pytest.raises(ConfigError, match=rf"{folder} cannot be made: .*; name another folder"):
            demo.make_toy(folder)
    assert list(tmp_path.iterdir()) == [mine]


def test_a_demo_is_made_whole(tmp_path: Path):
    for folder in (tmp_path / "new", tmp_path):
        with demo.made_whole(folder / "demo") as partial:
            (partial / "cluster.yaml").write_text("")
            assert not (folder / "demo").exists()
        assert os.listdir(folder / "demo") == ["cluster.yaml"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with demo.made_whole(empty) as partial:
        (partial / "cluster.yaml").write_text("")
    assert os.listdir(empty) == ["cluster.yaml"]
