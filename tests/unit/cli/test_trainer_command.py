"""`prelude trainer`: what it refuses before it serves. tests/unit/training/service/ has what it serves."""

import fcntl
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.clusters.certificates import authority, issued
from support.commands import Prelude

from adapters.model.base_weights import weights_digest
from cli.main import main
from cluster.config.load import load_cluster_config
from cluster.errors import ConfigError
from cluster.local.demo import make_demo
from cluster.trainer_key import trainer_key
from process.free_ports import bound_socket

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_demo(tmp_path_factory.mktemp("trainer") / "toy")
    made.write_text(f"{made.read_text()}trainer: {{url: 'http://127.0.0.1:8100'}}\n")
    return made


def changed(config: Path, name: str, **sections: Any) -> Path:
    """A copy with other sections; None: without it."""
    settings = {**yaml.safe_load(config.read_text()), **sections}
    copy = config.with_name(name)
    copy.write_text(yaml.safe_dump({key: value for key, value in settings.items() if value is not None}))
    return copy


@pytest.fixture
def trainer(capfd: pytest.CaptureFixture[str]) -> Prelude:
    return Prelude(capfd, ("trainer", "--device", "cpu"))


def in_folder(config: Path, folder: Path) -> Path:
    return changed(config, "folder.yaml", trainer={"url": "http://127.0.0.1:8100", "folder": str(folder)})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--row-tokens", "100"), "--row-tokens is 100; it must be a multiple of 128"),
        (("--device", "tpu"), "the device is 'tpu'"),
        (("--router", "10.0.0.7:8000"), "--router is 10.0.0.7:8000; give its URL, such as http://127.0.0.1:8000"),
        (("--host", "no-such-host.invalid"), "--host: no-such-host.invalid:8101 is not available"),
        (("--host", "a..b"), "--host: a..b:8101 is not available (no host has such a name)"),
    ],
)
def test_wrong_options(trainer: Prelude, config: Path, options: tuple[str, ...], why: str):
    trainer.refuses("--config", config, *options, says=why, status=2)


def test_ports_of_others_are_named_before_the_model_is_loaded(trainer: Prelude, config: Path):
    """Also the next one, of the status pages."""
    with bound_socket() as other:
        other.listen()
        taken = other.getsockname()[1]
        for port in (taken, taken - 1):
            of_another = changed(config, "taken.yaml", trainer={"url": f"http://127.0.0.1:{port}"})
            why = f"trainer.url: 127.0.0.1:{taken} is not available (Address already in use)"
            trainer.refuses("--config", of_another, says=why, status=2)


def test_clients_come_through_the_router(trainer: Prelude, config: Path):
    why = "has no section `trainer`; add `trainer: {url: http://127.0.0.1:8100}`, and give clients the router's URL"
    trainer.refuses("--config", changed(config, "none.yaml", trainer=None), says=why, status=2)
    command = replace(trainer, begin=("trainer", "list"))
    command.refuses("--config", config.with_name("none.yaml"), says=why, status=2)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:8100", "expected scheme, host and port alone, such as http://127.0.0.1:8100"),
        ("http://127.0.0.1:99999", "trainer.url: Port out of range"),
        ("http://user@127.0.0.1:8100", "expected scheme, host and port alone"),
        ("http://10.0.0.7:8100", "http://10.0.0.7:8100 is on another machine, and clients' keys would go there"),
        ("https://127.0.0.1:8100", "https://127.0.0.1:8100 has the wrong scheme: without `tls` it is http"),
    ],
)
def test_wrong_urls(trainer: Prelude, config: Path, url: str, why: str):
    trainer.refuses("--config", changed(config, "url.yaml", trainer={"url": url}), says=why, status=2)


def test_quotas_and_certificate_are_those_of_the_router(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    given: list[Any] = []
    monkeypatch.setattr("training.service.server.run", lambda options, *_: given.append(options))
    quotas = {"default": {"weight": 3, "training_tokens_per_min": 77}, "tenants": {"acme": {"weight": 5}}}
    certificate = issued(authority(tmp_path), "router", "router")
    tls = {"tls": {"certificate": str(certificate.certificate), "key": str(certificate.key)}}
    for router, *more in (({"quotas": quotas, "auth": {}},), (tls,), (tls, "--router", "https://api.example.com")):
        file = changed(config, "quotas.yaml", router=router)
        main(["trainer", "--config", str(file), "--device", "cpu", *more])
    assert [tuple(options.share_of("anybody")) for options in given] == [(3, 77), (1, None), (1, None)]
    assert [options.router_tls() is True for options in given] == [True, False, True]
    assert given[0].share_of("acme#1") == given[0].share_of("acme") != given[0].share_of("anybody")


def test_router_and_trainer_find_the_same_secret(config: Path, tmp_path: Path):
    trainer: Any = load_cluster_config(config).trainer
    assert (trainer.key, trainer.folder) == (config.parent / ".prelude/trainer.key", config.parent / ".prelude/trainer")
    path = tmp_path / "new" / "trainer.key"
    with ThreadPoolExecutor() as pool:
        found = set(pool.map(trainer_key, [path] * 16))
    assert [len(each) for each in found] == [43]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]
    for content in (b"", b"short", b"\xff" * 40, b"two lines of\n a secret that is long enough"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"trainer.key: .*/trainer.key"):
            trainer_key(path)


def test_a_folder_is_one_trainers(trainer: Prelude, config: Path, tmp_path: Path):
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = f"another trainer uses {tmp_path}"
        trainer.refuses("--config", in_folder(config, tmp_path), says=said, status=2)


def test_a_folder_is_of_one_base_model(trainer: Prelude, config: Path, tmp_path: Path):
    (tmp_path / "base").write_text(weights_digest(config.parent / "model")[:-1] + "-")
    said = f"{tmp_path} has adapters of another base model"
    trainer.refuses("--config", in_folder(config, tmp_path), says=said, status=2)


def test_a_damaged_log_is_named(trainer: Prelude, config: Path, tmp_path: Path):
    (tmp_path / "commands.db").write_bytes(b"no database" * 1000)
    said = f"the log in {tmp_path} cannot be read or written"
    trainer.refuses("--config", in_folder(config, tmp_path), says=said, status=2)
    assert (tmp_path / "base").read_text() == weights_digest(config.parent / "model")


def test_missing_libraries_are_named(trainer: Prelude, config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for name in [name for name in sys.modules if name.startswith("training.service")]:
        monkeypatch.delitem(sys.modules, name)
    trainer.refuses("--config", config, says=("zstandard", "pip install -e '.[train,trainer]'"))
