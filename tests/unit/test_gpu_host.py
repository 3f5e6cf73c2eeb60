"""What `make serve` installs and serves where there are GPUs, as far as that shows without one."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cluster.config.load import load_cluster_config
from cluster.errors import ConfigError, StartError
from cluster.local import demo
from cluster.local.gpus import Gpu, HostGpus, lay_out

ROOT = Path(__file__).parents[2]


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
        demo.make_demo(tmp_path / "demo", device="cuda")
    with pytest.raises(StartError, match="no GPU was found"):
        demo.make_demo(tmp_path / "demo", tmp_path / "model.gguf", device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_the_demo_takes_no_folder_that_has_files(tmp_path: Path):
    mine = tmp_path / "thesis.tex"
    mine.write_text("years of work")
    with pytest.raises(ConfigError, match=rf"{tmp_path} has files that are no demo; name a folder that is not there"):
        demo.make_demo(tmp_path)
    assert mine.read_text() == "years of work"
    for folder in (Path("/proc/demo"), mine):
        with pytest.raises(ConfigError, match=rf"{folder} cannot be made: .*; name another folder"):
            demo.make_demo(folder)
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
