"""`prelude certs`, and what a process says at its start about certificates that it cannot use."""

from __future__ import annotations

import json
import shutil
import stat
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.clusters.certificates import authority, expired
from support.commands import Prelude

from cluster.config.certificates import check_cluster
from cluster.config.load import load_cluster_config
from process.certificates.files import CertificateFiles, check, check_identity

CLUSTER = """
model: {path: model, name: demo}
workers:
  prefill-0: {role: prefill}
  decode-0: {role: decode}
tls:
  ca: certs/ca.crt
  certificate: certs/{name}.crt
  key: certs/{name}.key
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture
def prelude(capsys: pytest.CaptureFixture[str], config: Path) -> Prelude:
    return Prelude(capsys, end=("--config", str(config)))


@pytest.fixture
def certs(prelude: Prelude) -> Prelude:
    return replace(prelude, begin=("certs",))


def made(certs: Prelude) -> None:
    """An authority, and a certificate for every process."""
    certs.prints("init")
    certs.prints("issue")


def files(config: Path, name: str) -> CertificateFiles:
    folder = config.parent / "certs"
    return CertificateFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")


def test_a_small_cluster_gets_all_it_needs(config: Path, certs: Prelude, prelude: Prelude):
    certs.prints("init")
    found = certs.json("issue")["issued"]
    assert {name: each["identity"] for name, each in found.items()} == {
        "router": "spiffe://prelude.local/router/router",
        "operator": "spiffe://prelude.local/operator/operator",
        "prefill-0": "spiffe://prelude.local/prefill/prefill-0",
        "decode-0": "spiffe://prelude.local/decode/decode-0",
    }
    for name, role in (("router", "router"), ("prefill-0", "prefill"), ("decode-0", "decode")):
        own = files(config, name)
        assert check_identity(own, check(own), role, name).name == name
        assert stat.S_IMODE(own.key.stat().st_mode) == 0o600
    assert stat.S_IMODE((config.parent / "certs" / "ca.key").stat().st_mode) == 0o600


def test_cluster_yaml_gets_whole_paths(config: Path, certs: Prelude, monkeypatch: pytest.MonkeyPatch):
    """There, relative ones begin at its own folder."""
    (config.parent / "below").mkdir()
    monkeypatch.chdir(config.parent / "below")
    assert f"  ca: {config.parent}/below/kept/ca.crt" in certs.prints("init", "--folder", "kept")


def test_issue_makes_what_is_missing_and_nothing_twice(config: Path, certs: Prelude):
    certs.prints("init")
    certs.prints("issue", "router", "--host", "api.example.org", "--host", "10.0.0.7")
    before = files(config, "router").certificate.read_bytes()
    certs.prints("issue")
    assert files(config, "router").certificate.read_bytes() == before
    assert files(config, "decode-0").certificate.exists()
    assert certs.prints("issue") == "nothing to issue\n"


def test_renewed_ones_have_the_names_of_the_old_ones_and_other_keys(config: Path, certs: Prelude):
    from cryptography import x509

    certs.prints("init", "--trust-domain", "fleet-7")
    certs.prints("issue", "router", "--host", "api.example.org", "--host", "10.0.0.7", "--days", "10")
    certs.prints("issue", "decode-0", "--days", "60")

    def names(name: str) -> x509.SubjectAlternativeName:
        certificate = x509.load_pem_x509_certificate(files(config, name).certificate.read_bytes())
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    old, old_key, other = names("router"), files(config, "router").key.read_bytes(), names("decode-0")
    other_bytes = files(config, "decode-0").certificate.read_bytes()
    assert [Path(path).name for path in certs.json("renew")["renewed"]] == ["router.crt"]
    assert (names("router"), names("decode-0")) == (old, other)
    assert files(config, "router").key.read_bytes() != old_key
    assert files(config, "decode-0").certificate.read_bytes() == other_bytes
    assert check(files(config, "router")).identity is not None
    certs.prints("renew", "--within", "61")
    assert files(config, "decode-0").certificate.read_bytes() != other_bytes


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["issue"], 1, "`prelude certs init` makes an authority"),
        (["init", "--trust-domain", "Not A Domain"], 2, "must be lower-case letters"),
        (["init", "--days", "-3"], 2, "no number of days"),
        (["renew"], 1, "`prelude certs init` makes an authority"),
        (["issue", "--host", "[::1]"], 2, "without scheme, brackets or port; found '[::1]'"),
        (["init", "--days", "1", "--folder", "/proc/none"], 1, "No such file or directory: '/proc/none'"),
        (["issue", "nobody"], 2, "there is router, operator, prefill-0, decode-0"),
    ],
)
def test_wrong_usage_says_what_is_right(certs: Prelude, words: list[str], status: int, text: str):
    if words == ["issue", "nobody"]:
        certs.prints("init")
    certs.refuses(*words, says=text, status=status)


def test_what_the_system_refuses_is_an_error_in_json_too(certs: Prelude):
    assert certs.json("init", "--folder", "/proc/none", status=1)["error"]["code"] == "system_error"


def test_one_that_cannot_be_renewed_does_not_keep_others_from_it(config: Path, certs: Prelude):
    made(certs)
    before = files(config, "router").certificate.read_bytes()
    (config.parent / "certs" / "clients.crt").write_text("of somebody else")
    found = certs.refuses("renew", "--within", "91", "--json", says="clients.crt: has no certificate")
    assert [Path(path).stem for path in json.loads(found)["renewed"]] == ["decode-0", "operator", "prefill-0", "router"]
    assert files(config, "router").certificate.read_bytes() != before


class TestAnAuthorityIsReplaced:
    """As docs/security.md has it: old and new are in ca.crt for a while."""

    @pytest.mark.parametrize("is_new_last", [True, False])
    def test_the_key_decides_which_one_issues(self, config: Path, certs: Prelude, is_new_last: bool):
        made(certs)
        old, new = config.parent / "certs", config.parent / "new"
        certs.prints("init", "--folder", new)
        both = [(old / "ca.crt").read_text(), (new / "ca.crt").read_text()]
        for folder in (old, new):
            (folder / "ca.crt").write_text("".join(both if is_new_last else both[::-1]))
        for folder, name in ((old, "decode-0"), (new, "prefill-0")):
            certs.prints("issue", name, "--folder", folder)
            own = CertificateFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")
            assert check(own).identity is not None

    @pytest.mark.parametrize("wrong", ["another's", "damaged", "of another kind", "with a password"])
    def test_a_key_that_cannot_sign_changes_nothing(self, config: Path, certs: Prelude, wrong: str):
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec, rsa
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        made(certs)
        before = files(config, "router").certificate.read_bytes()
        is_rsa = wrong == "of another kind"
        key = rsa.generate_private_key(65537, 2048) if is_rsa else ec.generate_private_key(ec.SECP256R1())
        hidden = BestAvailableEncryption(b"password") if wrong == "with a password" else NoEncryption()
        pem = b"no key" if wrong == "damaged" else key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden)
        (config.parent / "certs" / "ca.key").write_bytes(pem)
        if is_rsa:  # of an authority that is not ours
            name, at = x509.Name([]), datetime.now(UTC)
            made_elsewhere = x509.CertificateBuilder(name, name, key.public_key(), 1, at, at + timedelta(days=9))
            ca_pem = made_elsewhere.sign(key, SHA256()).public_bytes(Encoding.PEM)
            (config.parent / "certs" / "ca.crt").write_bytes(ca_pem)
        for words in (["issue", "router"], ["renew", "--within", "91"]):
            certs.refuses(*words, says="ca.")
        assert files(config, "router").certificate.read_bytes() == before

    def test_an_expired_one_issues_nothing(self, config: Path, certs: Prelude):
        certs.prints("init", "--days", "1e-9")
        certs.refuses("issue", says="ca.crt: expired at")
        assert not files(config, "router").certificate.exists()


def test_init_replaces_no_authority(config: Path, certs: Prelude):
    certs.prints("init")
    before = (config.parent / "certs" / "ca.key").read_bytes()
    certs.prints("init", status=1)
    assert (config.parent / "certs" / "ca.key").read_bytes() == before


class TestStart:
    """Each error names the file of the certificate, the line of cluster.yaml, and the remedy."""

    def test_an_expired_certificate(self, config: Path, prelude: Prelude):
        old = expired(authority(config.parent / "certs"), "router")
        for path in (old.certificate, old.key):
            shutil.move(path, path.with_stem("router"))
        said = f"{config}:8: tls.certificate: {config.parent}/certs/router.crt: expired at "
        prelude.refuses("router", says=(said, "`prelude certs renew`"), status=2)

    def test_a_key_of_another_certificate(self, config: Path, certs: Prelude, prelude: Prelude):
        made(certs)
        shutil.copy(files(config, "decode-0").key, files(config, "router").key)
        said = f"{config}:9: tls.key: {config.parent}/certs/router.key: is not the private key of "
        prelude.refuses("router", says=said, status=2)

    def test_another_authority(self, config: Path, certs: Prelude, prelude: Prelude, tmp_path: Path):
        made(certs)
        shutil.copy(authority(tmp_path / "other").certificate, config.parent / "certs" / "ca.crt")
        said = f"{config}:8: tls.certificate: {config.parent}/certs/prefill-0.crt: was issued by "
        prelude.refuses("prefill-worker", "--name", "prefill-0", says=said, status=2)

    def test_the_certificate_of_another_process(self, config: Path, certs: Prelude, prelude: Prelude):
        made(certs)
        for suffix in ("crt", "key"):
            shutil.copy(config.parent / "certs" / f"prefill-0.{suffix}", config.parent / "certs" / f"decode-0.{suffix}")
        said = "is the certificate of prefill prefill-0, and this is decode decode-0"
        prelude.refuses("decode-worker", "--name", "decode-0", says=said, status=2)
        prelude.refuses("up", says="is the certificate of prefill prefill-0", status=2)

    def test_workers_that_change_their_role_need_certificates_for_both(
        self, config: Path, certs: Prelude, prelude: Prelude
    ):
        made(certs)
        config.write_text(CLUSTER + "role_changes: manual\n")
        said = "is the certificate of decode decode-0, and this is switching decode-0"
        prelude.refuses("decode-worker", "--name", "decode-0", says=said, status=2)
        assert "spiffe://prelude.local/switching/decode-0" in certs.prints("issue", "prefill-0", "decode-0")
        check_cluster(load_cluster_config(config))
        config.write_text(CLUSTER + "role_changes: dry-run\n")
        said = "is the certificate of switching decode-0, and this is decode decode-0"
        prelude.refuses("decode-worker", "--name", "decode-0", says=said, status=2)

    def test_a_missing_file_and_no_certificate_at_all(self, config: Path, certs: Prelude, prelude: Prelude):
        certs.prints("init")
        prelude.refuses("router", says="router.crt: cannot be read", status=2)
        certs.prints("issue", "router")
        files(config, "router").certificate.write_text("nothing")
        prelude.refuses("router", says="has no certificate in PEM form", status=2)

    def test_commands_need_the_operators(self, config: Path, certs: Prelude, prelude: Prelude):
        certs.prints("init")
        said = f"{config}:8: tls.certificate: {config.parent}/certs/operator.crt: cannot be read"
        prelude.refuses("workers", "list", says=said, status=2)

    def test_names_that_are_other_processes(self, config: Path, prelude: Prelude):
        config.write_text(CLUSTER.replace("decode-0", "operator"))
        prelude.refuses("router", says="that name is another process's certificate", status=2)


class TestPlainText:
    """Beyond loopback it has to be said."""

    ROUTER = CLUSTER.split("tls:", maxsplit=1)[0] + "router: {host: 0.0.0.0, auth: {}}\n"
    ADMIN = ROUTER.replace("host: 0.0.0.0, auth: {}", "auth: {}, admin: {host: 0.0.0.0}")
    WORKER = CLUSTER.split("tls:", maxsplit=1)[0].replace("role: decode", "role: decode, host: 192.0.2.9")
    ENGINE = CLUSTER.split("tls:", maxsplit=1)[0].replace("role: decode", "role: decode, engine_host: 192.0.2.9")

    @pytest.mark.parametrize(
        ("text", "words", "place"),
        [
            (ROUTER, ["router"], "6: router.host: 0.0.0.0 "),
            (ROUTER, ["up"], "6: router.host: 0.0.0.0 "),
            (ADMIN, ["router"], "6: router.admin.host: 0.0.0.0 "),
            (ADMIN, ["up"], "6: router.admin.host: 0.0.0.0 "),
            (ADMIN.replace("auth: {}, ", ""), ["router"], "6: router.admin.host: 0.0.0.0 "),
            (ADMIN.replace("0.0.0.0", "'::'"), ["router"], "6: router.admin.host: :: "),
            (WORKER, ["decode-worker", "--name", "decode-0"], "5: workers.decode-0.host: 192.0.2.9 "),
            (WORKER, ["router"], "5: workers.decode-0.host: 192.0.2.9 "),
            (WORKER, ["workers", "list"], "5: workers.decode-0.host: 192.0.2.9 "),
            (ENGINE, ["decode-worker", "--name", "decode-0"], "5: workers.decode-0.engine_host: 192.0.2.9 "),
        ],
    )
    def test_is_refused_with_the_remedy(self, config: Path, prelude: Prelude, text: str, words: list[str], place: str):
        config.write_text(text)
        status, _, error = prelude(*words)
        assert (status, f"{config}:{place}" in error, "insecure: true" in error) == (2, True, True)
        assert "Set `" in error or "Set host to 127.0.0.1" in error

    @pytest.mark.parametrize(
        "text",
        [
            ROUTER.replace("auth: {}", "insecure: true"),
            WORKER + "router: {insecure: true}\n",
            ADMIN.replace("0.0.0.0", "0.0.0.0, insecure: true"),
            ADMIN.replace("auth: {}", "insecure: true"),
        ],
    )
    def test_is_allowed_where_it_is_asked_for(self, config: Path, text: str):
        config.write_text(text)
        check_cluster(load_cluster_config(config))

    def test_tls_of_the_cluster_is_no_tls_for_clients(self, config: Path, certs: Prelude, prelude: Prelude):
        config.write_text(CLUSTER + "router: {host: 0.0.0.0, auth: {}}\n")
        made(certs)
        prelude.refuses("router", says=": router.host: 0.0.0.0 ", status=2)
        own = "tls: {certificate: certs/router.crt, key: certs/router.key}"
        config.write_text(config.read_text().replace("auth: {}", own))
        check_cluster(load_cluster_config(config))
