"""Real certificates of a small authority, for tests with real sockets."""

import datetime as dt
from collections.abc import Iterable
from pathlib import Path

from process.certificates.authority import Authority
from process.certificates.files import CertificateFiles
from process.certificates.identity import Identity


def authority(folder: Path) -> Authority:
    made = Authority(folder)
    made.init()
    return made


def issued(
    by: Authority,
    role: str,
    name: str,
    *,
    days: float = 90,
    stem: str | None = None,
    hosts: tuple[str, ...] = (),
    trust_domain: str | None = None,
    ca: Path | None = None,
    ago: dt.timedelta = dt.timedelta(),
) -> CertificateFiles:
    """The files of a process. `ago`: when it was made; with `days` in the past it has expired."""
    identity = Identity(role, name, trust_domain or by.trust_domain)
    start = dt.datetime.now(dt.UTC) - ago
    certificate, key = by.issue(identity, days=days, stem=stem or f"{role}-{name}", hosts=hosts, valid_from=start)
    return CertificateFiles(certificate, key, ca or by.certificate)


def of_changing_workers(root: Path, workers: Iterable[str]) -> dict[str, str]:
    """Certificates in a folder of `root`, for a cluster in which these change their roles; its section `tls`."""
    by = authority(root / "certs")
    for name in ("router", "operator"):
        issued(by, name, name, stem=name)
    for name in workers:
        issued(by, "switching", name, stem=name)
    return {"ca": "certs/ca.crt", "certificate": "certs/{name}.crt", "key": "certs/{name}.key"}


def expired(by: Authority, name: str) -> CertificateFiles:
    return issued(by, "router", name, days=1, stem=f"expired-{name}", ago=dt.timedelta(days=3))
