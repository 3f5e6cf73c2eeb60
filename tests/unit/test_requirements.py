"""The files of requirements/ have hashes of what they pin; requirements/lock.py takes those of wheels that fit."""

import importlib.util
import re
from pathlib import Path

import pytest

from engine.pin import SGLANG_VERSION

FOLDER = Path(__file__).parents[2] / "requirements"
WHEELS = (
    "a-1.0-py3-none-any.whl",
    "a-1.0-py2.py3-none-any.whl",
    "a-1.0-cp311-cp311-manylinux1_x86_64.manylinux2014_x86_64.whl",
    "a-1.0-cp312-cp312-manylinux_2_28_aarch64.whl",
    "a-1.0-cp310-abi3-linux_x86_64.whl",
    "a-1.0-cp313-none-any.whl",
)
OTHERS = (
    "a-1.0.tar.gz",
    "a-1.0.1-py3-none-any.whl",
    "a-1.0-py2-none-any.whl",
    "a-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
    "a-1.0-cp314-cp314-manylinux_2_28_x86_64.whl",
    "a-1.0-cp313-cp313t-manylinux_2_28_x86_64.whl",
    "a-1.0-cp312-cp312-musllinux_1_2_x86_64.whl",
    "a-1.0-cp312-cp312-manylinux_2_28_armv7l.whl",
    "a-1.0-cp312-cp312-macosx_11_0_arm64.whl",
    "a-1.0-cp312-cp312-win_amd64.whl",
)


def test_every_pin_has_hashes_the_same_in_each_file():
    seen: dict[str, list[str]] = {}
    for path in FOLDER.glob("*.txt"):
        lines = [line for line in path.read_text().replace("\\\n", "").splitlines() if not line.startswith("#")]
        for pin, *found in map(str.split, lines):
            assert re.fullmatch(r"[\w.-]+==[\w.]+", pin), f"{path.name}: {pin}"
            if path.name != "torch.txt":  # it says why
                assert found, f"{path.name}: {pin} has no hash: run requirements/lock.py"
                assert [each for each in found if not re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each)] == []
                assert seen.setdefault(pin, found) == found, f"{path.name}: {pin}: run requirements/lock.py"
    assert len(seen) > 200


def pins(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (FOLDER / name).read_text(), re.MULTILINE))


def test_gpu_hosts_have_the_releases_that_are_tested_here():
    """So have routers and workers: see tests/chart/test_images.py."""
    tested, own = pins("cpu.txt"), pins("gpu.txt")
    assert {"accelerate", "gguf"} <= tested.keys()  # they read the demo's model: with `make setup` alone, too
    del tested["triton"]  # the GPU build of torch has its own
    assert {each: release for each, release in own.items() if tested.get(each, release) != release} == {}
    assert tested.keys() <= own.keys()
    # What torch 2.14.1 and SGLang 0.5.23 name exactly in their metadata.
    exact = {"sglang": SGLANG_VERSION, "torch": "2.14.1", "torchaudio": "2.11.0", "triton": "3.8.0"}
    exact |= {"cuda-toolkit": "13.0.3.0", "nvidia-cudnn-cu13": "9.24.0.43", "nvidia-nccl-cu13": "2.30.7"}
    exact |= {"nvidia-nvshmem-cu13": "3.4.5", "nvidia-cusparselt-cu13": "0.8.1", "sglang-kernel": "0.4.10"}
    exact |= {"flashinfer-python": "0.7.2"}
    assert exact.items() <= own.items()


def test_a_pin_gets_the_hashes_of_its_wheels_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
    assert spec is not None
    assert spec.loader is not None
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    monkeypatch.setattr(lock, "__file__", str(tmp_path / "lock.py"))
    files = {"a": [*WHEELS, *OTHERS]}
    monkeypatch.setattr(
        lock, "files_of", lambda _, name: [{"filename": f, "hashes": {"sha256": f}} for f in files[name]]
    )
    for name in lock.FILES:
        (tmp_path / f"{name}.txt").write_text("# a==2, once\na==1.0 \\\n    --hash=sha256:old\n")
    for _ in range(2):
        lock.main("the index")
        for name in lock.FILES:
            _, pin, *found = (tmp_path / f"{name}.txt").read_text().replace(" \\", "").splitlines()
            assert (pin, found) == ("a==1.0", sorted(f"    --hash=sha256:{each}" for each in WHEELS))
    files["a"] = list(OTHERS)
    with pytest.raises(SystemExit, match=r"no wheel of release 1\.0 fits"):
        lock.main("the index")
