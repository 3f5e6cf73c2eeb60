"""`prelude trainer`: what it refuses before it serves. tests/unit/training/service/ has what it serves."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

import pytest
import yaml

from adapters.model.base_weights import weights_digest
from cli.main import main
from cluster.local.demo import make_toy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("trainer") / "toy")


def refused(capfd: pytest.CaptureFixture[str], config: Path, *options: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["trainer", "--config", str(config), "--device", "cpu", *options])
    assert ended.value.code == 2
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--host", "0.0.0.0"), "without router.auth anybody could train"),
        (("--row-tokens", "100"), "--row-tokens is 100; it must be a multiple of 128"),
        (("--device", "tpu"), "the device is 'tpu'"),
    ],
)
def test_wrong_options(capfd: pytest.CaptureFixture[str], config: Path, options: tuple[str, ...], why: str):
    assert why in refused(capfd, config, *options)


def test_tokens_alone_are_no_keys(capfd: pytest.CaptureFixture[str], config: Path):
    other = config.with_name("tokens.yaml")
    settings = yaml.safe_load(config.read_text())
    issuer = {"issuer": "https://id.example.org", "audience": "prelude"}
    settings["router"] = {**settings.get("router", {}), "auth": {"keys": False, "oidc": [issuer]}}
    other.write_text(yaml.safe_dump(settings))
    assert "the Tinker SDK can send keys only" in refused(capfd, other)


def test_a_folder_is_one_trainers(capfd: pytest.CaptureFixture[str], config: Path, tmp_path: Path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert f"another trainer uses {tmp_path}" in refused(capfd, config, "--folder", str(tmp_path))


def test_a_folder_is_of_one_base_model(capfd: pytest.CaptureFixture[str], config: Path, tmp_path: Path):
    (tmp_path / "base").write_text(weights_digest(config.parent / "model")[:-1] + "-")
    assert f"{tmp_path} has adapters of another base model" in refused(capfd, config, "--folder", str(tmp_path))


def test_a_damaged_log_is_named(capfd: pytest.CaptureFixture[str], config: Path, tmp_path: Path):
    (tmp_path / "commands.db").write_bytes(b"no database" * 1000)
    assert f"the log in {tmp_path} cannot be read or written" in refused(capfd, config, "--folder", str(tmp_path))
    assert (tmp_path / "base").read_text() == weights_digest(config.parent / "model")


def test_missing_libraries_are_named(capfd: pytest.CaptureFixture[str], config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for name in [name for name in sys.modules if name.startswith("training.service")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as ended:
        main(["trainer", "--config", str(config)])
    assert ended.value.code == 1
    assert "zstandard" in (said := capfd.readouterr().err)
    assert "pip install -e '.[train,trainer]'" in said
