"""`prelude certs`, and what a process says at its start about certificates that it cannot use."""

from __future__ import annotations

import json
import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.clusters.certificates import authority, expired

from cli.main import main
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


def certs(config: Path, *words: str, status: int = 0) -> None:
    given = ["certs", *words, "--config", str(config)]
    if status == 0:
        main(given)
        return
    with pytest.raises(SystemExit) as end:
        main(given)
    assert end.value.code == status


def made(config: Path) -> None:
    """An authority, and a certificate for every process."""
    certs(config, "init")
    certs(config, "issue")


def files(config: Path, name: str) -> CertificateFiles:
    folder = config.parent / "certs"
    return CertificateFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")


def test_a_small_cluster_gets_all_it_needs(config: Path, capsys: pytest.CaptureFixture[str]):
    certs(config, "init")
    certs(config, "issue", "--json")
    out = capsys.readouterr().out
    found = json.loads(out[out.index("{\n") :])["issued"]
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


def test_cluster_yaml_gets_whole_paths(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """There, relative ones begin at its own folder."""
    (config.parent / "below").mkdir()
    monkeypatch.chdir(config.parent / "below")
    certs(config, "init", "--folder", "kept")
    assert f"  ca: {config.parent}/below/kept/ca.crt" in capsys.readouterr().out


def test_issue_makes_what_is_missing_and_nothing_twice(config: Path, capsys: pytest.CaptureFixture[str]):
    certs(config, "init")
    certs(config, "issue", "router", "--host", "api.example.org", "--host", "10.0.0.7")
    before = files(config, "router").certificate.read_bytes()
    certs(config, "issue")
    assert files(config, "router").certificate.read_bytes() == before
    assert files(config, "decode-0").certificate.exists()
    capsys.readouterr()
    certs(config, "issue")
    assert capsys.readouterr().out == "nothing to issue\n"


def test_renewed_ones_have_the_names_of_the_old_ones_and_other_keys(config: Path, capsys: pytest.CaptureFixture[str]):
    from cryptography import x509

    certs(config, "init", "--trust-domain", "fleet-7")
    certs(config, "issue", "router", "--host", "api.example.org", "--host", "10.0.0.7", "--days", "10")
    certs(config, "issue", "decode-0", "--days", "60")

    def names(name: str) -> x509.SubjectAlternativeName:
        certificate = x509.load_pem_x509_certificate(files(config, name).certificate.read_bytes())
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value

    old, old_key, other = names("router"), files(config, "router").key.read_bytes(), names("decode-0")
    other_bytes = files(config, "decode-0").certificate.read_bytes()
    capsys.readouterr()
    certs(config, "renew", "--json")
    assert [Path(path).name for path in json.loads(capsys.readouterr().out)["renewed"]] == ["router.crt"]
    assert (names("router"), names("decode-0")) == (old, other)
    assert files(config, "router").key.read_bytes() != old_key
    assert files(config, "decode-0").certificate.read_bytes() == other_bytes
    assert check(files(config, "router")).identity is not None
    certs(config, "renew", "--within", "61")
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
def test_wrong_usage_says_what_is_right(
    config: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, text: str
):
    if words == ["issue", "nobody"]:
        certs(config, "init")
    certs(config, *words, status=status)
    assert text in capsys.readouterr().err


def test_what_the_system_refuses_is_an_error_in_json_too(config: Path, capsys: pytest.CaptureFixture[str]):
    certs(config, "init", "--folder", "/proc/none", "--json", status=1)
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "system_error"


def test_one_that_cannot_be_renewed_does_not_keep_others_from_it(config: Path, capsys: pytest.CaptureFixture[str]):
    certs(config, "init")
    certs(config, "issue")
    before = files(config, "router").certificate.read_bytes()
    (config.parent / "certs" / "clients.crt").write_text("of somebody else")
    capsys.readouterr()
    certs(config, "renew", "--within", "91", "--json", status=1)
    found = capsys.readouterr()
    assert "clients.crt: has no certificate" in found.err
    assert [Path(path).stem for path in json.loads(found.out)["renewed"]] == [
        "decode-0", "operator", "prefill-0", "router"
    ]  # fmt: skip
    assert files(config, "router").certificate.read_bytes() != before


class TestAnAuthorityIsReplaced:
    """As docs/security.md has it: old and new are in ca.crt for a while."""

    @pytest.mark.parametrize("is_new_last", [True, False])
    def test_the_key_decides_which_one_issues(self, config: Path, is_new_last: bool):
        made(config)
        old, new = config.parent / "certs", config.parent / "new"
        certs(config, "init", "--folder", str(new))
        both = [(old / "ca.crt").read_text(), (new / "ca.crt").read_text()]
        for folder in (old, new):
            (folder / "ca.crt").write_text("".join(both if is_new_last else both[::-1]))
        for folder, name in ((old, "decode-0"), (new, "prefill-0")):
            certs(config, "issue", name, "--folder", str(folder))
            own = CertificateFiles(folder / f"{name}.crt", folder / f"{name}.key", folder / "ca.crt")
            assert check(own).identity is not None

    @pytest.mark.parametrize("wrong", ["another's", "damaged", "of another kind", "with a password"])
    def test_a_key_that_cannot_sign_changes_nothing(self, config: Path, capsys: pytest.CaptureFixture[str], wrong: str):
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec, rsa
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        made(config)
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
            certs(config, *words, status=1)
            assert "ca." in capsys.readouterr().err
        assert files(config, "router").certificate.read_bytes() == before

    def test_an_expired_one_issues_nothing(self, config: Path, capsys: pytest.CaptureFixture[str]):
        certs(config, "init", "--days", "1e-9")
        certs(config, "issue", status=1)
        assert "ca.crt: expired at" in capsys.readouterr().err
        assert not files(config, "router").certificate.exists()


def test_init_replaces_no_authority(config: Path, capsys: pytest.CaptureFixture[str]):
    certs(config, "init")
    before = (config.parent / "certs" / "ca.key").read_bytes()
    certs(config, "init", status=1)
    assert (config.parent / "certs" / "ca.key").read_bytes() == before


class TestStart:
    """Each error names the file of the certificate, the line of cluster.yaml, and the remedy."""

    def refused(self, config: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main([*words, "--config", str(config)])
        assert end.value.code == 2
        return capsys.readouterr().err

    def test_an_expired_certificate(self, config: Path, capsys: pytest.CaptureFixture[str]):
        old = expired(authority(config.parent / "certs"), "router")
        for path in (old.certificate, old.key):
            shutil.move(path, path.with_stem("router"))
        error = self.refused(config, capsys, "router")
        assert f"{config}:8: tls.certificate: {config.parent}/certs/router.crt: expired at " in error
        assert "`prelude certs renew`" in error

    def test_a_key_of_another_certificate(self, config: Path, capsys: pytest.CaptureFixture[str]):
        made(config)
        shutil.copy(files(config, "decode-0").key, files(config, "router").key)
        error = self.refused(config, capsys, "router")
        assert f"{config}:9: tls.key: {config.parent}/certs/router.key: is not the private key of " in error

    def test_another_authority(self, config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
        made(config)
        shutil.copy(authority(tmp_path / "other").certificate, config.parent / "certs" / "ca.crt")
        error = self.refused(config, capsys, "prefill-worker", "--name", "prefill-0")
        assert f"{config}:8: tls.certificate: {config.parent}/certs/prefill-0.crt: was issued by " in error

    def test_the_certificate_of_another_process(self, config: Path, capsys: pytest.CaptureFixture[str]):
        made(config)
        for suffix in ("crt", "key"):
            shutil.copy(config.parent / "certs" / f"prefill-0.{suffix}", config.parent / "certs" / f"decode-0.{suffix}")
        error = self.refused(config, capsys, "decode-worker", "--name", "decode-0")
        assert "is the certificate of prefill prefill-0, and this is decode decode-0" in error
        assert "is the certificate of prefill prefill-0" in self.refused(config, capsys, "up")

    def test_workers_that_change_their_role_need_certificates_for_both(
        self, config: Path, capsys: pytest.CaptureFixture[str]
    ):
        made(config)
        config.write_text(CLUSTER + "role_changes: manual\n")
        error = self.refused(config, capsys, "decode-worker", "--name", "decode-0")
        assert "is the certificate of decode decode-0, and this is switching decode-0" in error
        certs(config, "issue", "prefill-0", "decode-0")
        assert "spiffe://prelude.local/switching/decode-0" in capsys.readouterr().out
        check_cluster(load_cluster_config(config))
        config.write_text(CLUSTER + "role_changes: dry-run\n")
        error = self.refused(config, capsys, "decode-worker", "--name", "decode-0")
        assert "is the certificate of switching decode-0, and this is decode decode-0" in error

    def test_a_missing_file_and_no_certificate_at_all(self, config: Path, capsys: pytest.CaptureFixture[str]):
        certs(config, "init")
        assert "router.crt: cannot be read" in self.refused(config, capsys, "router")
        certs(config, "issue", "router")
        files(config, "router").certificate.write_text("nothing")
        assert "has no certificate in PEM form" in self.refused(config, capsys, "router")

    def test_commands_need_the_operators(self, config: Path, capsys: pytest.CaptureFixture[str]):
        certs(config, "init")
        error = self.refused(config, capsys, "workers", "list")
        assert f"{config}:8: tls.certificate: {config.parent}/certs/operator.crt: cannot be read" in error

    def test_names_that_are_other_processes(self, config: Path, capsys: pytest.CaptureFixture[str]):
        config.write_text(CLUSTER.replace("decode-0", "operator"))
        assert "that name is another process's certificate" in self.refused(config, capsys, "router")


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
    def test_is_refused_with_the_remedy(
        self, config: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str], place: str
    ):
        config.write_text(text)
        error = TestStart().refused(config, capsys, *words)
        assert f"{config}:{place}" in error
        assert "Set `" in error or "Set host to 127.0.0.1" in error
        assert "insecure: true" in error

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

    def test_tls_of_the_cluster_is_no_tls_for_clients(self, config: Path, capsys: pytest.CaptureFixture[str]):
        config.write_text(CLUSTER + "router: {host: 0.0.0.0, auth: {}}\n")
        made(config)
        assert ": router.host: 0.0.0.0 " in TestStart().refused(config, capsys, "router")
        own = "tls: {certificate: certs/router.crt, key: certs/router.key}"
        config.write_text(config.read_text().replace("auth: {}", own))
        check_cluster(load_cluster_config(config))
