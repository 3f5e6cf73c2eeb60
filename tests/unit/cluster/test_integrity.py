"""The keys of a cluster: made for one machine, given for others, and never quietly missing."""

import hashlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.clusters.configs import config_of

from adapters.store import AdapterNotTrusted, Envelope
from adapters.store.signing import Signer
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from cluster.integrity import KEY_VARIABLE, signer_of, trust_of
from cluster.trainer_key import trainer_key

REVISION = "sha256:" + "1" * 64
ENVELOPE = Envelope(REVISION, hashlib.sha256(b"tensors").hexdigest(), 7)


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def config_in(folder: Path, host: str = "127.0.0.1", **sections) -> ClusterConfig:
    (folder / "config.json").write_text(json.dumps({}))
    config = config_of({"u": {"role": "unified", "host": host}}, folder, **sections)
    return config.with_default_places(folder / ".prelude")


def test_a_cluster_on_one_machine_makes_its_keys_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written, fsync = set[int](), os.fsync  # which outlasts a power cut
    monkeypatch.setattr(os, "fsync", lambda file: written.add(os.fstat(file).st_ino) or fsync(file))
    trainer_key(tmp_path / "trainer.key")
    config = config_in(tmp_path)
    trust = trust_of(config)  # a worker that starts before the router
    with pytest.raises(AdapterNotTrusted):
        trust.check_push(ENVELOPE)
    found: list[Signer | None] = []
    threads = [threading.Thread(target=lambda: found.append(signer_of(config))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [signed] = {each.signed(ENVELOPE) for each in found if each is not None}
    keys = tmp_path / ".prelude" / "signing"
    assert sorted(path.name for path in keys.iterdir()) == ["private.pem", "public.pem"]
    assert {each.stat().st_ino for each in (*keys.iterdir(), keys, keys.parent, tmp_path / "trainer.key")} <= written
    assert (keys / "private.pem").stat().st_mode & 0o777 == 0o600
    assert not [path for path in keys.parent.iterdir() if path.name.startswith(".")]
    trust = trust_of(config)
    trust.check_push(signed)
    trust.check_object(signed)
    for check in (trust.check_push, trust.check_object):
        with pytest.raises(AdapterNotTrusted, match="has no signature"):
            check(ENVELOPE)


def test_a_store_that_others_may_use_needs_no_signatures(tmp_path: Path):
    config = config_in(tmp_path, store={"url": f"file://{tmp_path}/shared"})
    trust_of(config).check_object(Signer.generate().signed(ENVELOPE))
    strict = config_in(tmp_path, store={"url": f"file://{tmp_path}/shared"}, integrity={"accept_unverified": False})
    with pytest.raises(AdapterNotTrusted):
        trust_of(strict).check_object(ENVELOPE)


def test_several_machines_need_keys_for_pushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = config_in(tmp_path, host="10.0.0.5")
    assert signer_of(config) is None
    assert not (tmp_path / ".prelude" / "signing").exists()
    trust = trust_of(config)
    trust.check_object(ENVELOPE)  # as before there were signatures
    with pytest.raises(AdapterNotTrusted, match=r"integrity\.signing_key"):
        trust.check_push(ENVELOPE)

    key = Signer.generate()
    (tmp_path / "key.pem").write_bytes(key.private_pem)
    (tmp_path / "key.pub").write_bytes(key.public_pem)
    router = config_in(tmp_path, host="10.0.0.5", integrity={"signing_key": tmp_path / "key.pem"})
    worker = trust_of(config_in(tmp_path, host="10.0.0.5", integrity={"trusted_keys": [tmp_path / "key.pub"]}))
    signer = signer_of(router)
    assert signer is not None
    worker.check_push(signer.signed(ENVELOPE))
    worker.check_object(signer.signed(ENVELOPE))
    for check in (worker.check_push, worker.check_object):
        with pytest.raises(AdapterNotTrusted):
            check(ENVELOPE)
    monkeypatch.setenv(KEY_VARIABLE, key.private_pem.decode())
    assert signer_of(config).signed(ENVELOPE) == signer.signed(ENVELOPE)
    monkeypatch.setenv(KEY_VARIABLE, "secret")
    with pytest.raises(ConfigError, match=rf"{KEY_VARIABLE}: not a private key in PEM"):
        signer_of(config)


@pytest.mark.parametrize(
    ("field", "content", "says"),
    [
        ("signing_key", None, "cannot be read"),
        ("signing_key", b"no key", "not a private key in PEM"),
        ("trusted_keys", None, "cannot be read"),
        ("trusted_keys", b"no key", "not a public key in PEM"),
    ],
)
def test_a_wrong_key_ends_the_start(tmp_path: Path, field: str, content: bytes | None, says: str):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    config = config_in(tmp_path, integrity={field: [path] if field == "trusted_keys" else path})
    with pytest.raises(ConfigError, match=rf"integrity.{field}: {path}.*{says}"):
        (trust_of if field == "trusted_keys" else signer_of)(config)


def test_loads_in_several_threads_all_find_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also a worker that was asked in vain a moment ago, and while another thread reads the file."""
    config = config_in(tmp_path)
    trust = trust_of(config)
    assert not trust.keys()
    signer = signer_of(config)
    assert signer is not None
    barrier, read = threading.Barrier(8), Path.read_bytes

    def slowly(path: Path) -> bytes:
        time.sleep(0.05)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", slowly)

    def check(_: int) -> None:
        barrier.wait(120)
        trust.check_object(signer.signed(ENVELOPE))

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(check, range(8))) == [None] * 8
