"""A small certificate authority in a folder, for a cluster that has no other. Behind `prelude certs`."""

import contextlib
import datetime as dt
import ipaddress
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from process.certificates.files import check_time
from process.certificates.identity import TRUST_DOMAIN, CertificateError, Identity

CA_DAYS = 3650
DAYS = 90
_BACKDATED = dt.timedelta(minutes=5)  # hosts' clocks differ


@dataclass(frozen=True, slots=True)
class Authority:
    """The folder of an authority: `ca.crt`, which every process gets, and `ca.key`, which none does."""

    folder: Path

    @property
    def certificate(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        return self.folder / "ca.key"

    def init(self, *, trust_domain: str = TRUST_DOMAIN, days: float = CA_DAYS) -> None:
        """Make a new authority. Raises CertificateError if the folder has one."""
        if self.key.exists() or self.certificate.exists():
            raise CertificateError("ca", self.certificate, "exists; `prelude certs renew` renews what it has issued")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{trust_domain} {secrets.token_hex(4)}")])
        uri = x509.UniformResourceIdentifier(f"spiffe://{trust_domain}")
        usage = _usage(key_cert_sign=True, crl_sign=True, digital_signature=False)
        certificate = (
            _builder(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectAlternativeName([uri]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .sign(key, hashes.SHA256())
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self.key, _key_pem(key), private=True)
        _write(self.certificate, certificate.public_bytes(Encoding.PEM))

    @property
    def trust_domain(self) -> str:
        """Raises CertificateError if there is no authority."""
        try:
            names = self._load()[0].extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uri = names.get_values_for_type(x509.UniformResourceIdentifier)[0]
        except (IndexError, x509.ExtensionNotFound) as error:
            raise CertificateError(
                "ca", self.certificate, "names no trust domain; `prelude certs init` makes one"
            ) from error
        return uri.removeprefix("spiffe://")

    def issue(
        self,
        identity: Identity,
        *,
        hosts: Iterable[str] = (),
        days: float = DAYS,
        stem: str | None = None,
        valid_from: dt.datetime | None = None,
    ) -> tuple[Path, Path]:
        """Write NAME.crt and NAME.key (or `stem`) for a process, with a new key. Raises CertificateError.

        `hosts`: more names and addresses under which it is reached, such as a router's by its clients.
        """
        authority, authority_key = self._load()
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{identity.role}/{identity.name}"[:64])])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(identity.dns)]
        names += [_general_name(host) for host in hosts]
        issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(subject, authority.subject, key.public_key(), days, valid_from)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(key_cert_sign=False, crl_sign=False, digital_signature=True), critical=True)
            .add_extension(usages, critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(issuer_id, critical=False)
            .sign(authority_key, hashes.SHA256())
        )
        stem = identity.name if stem is None else stem
        certificate_path, key_path = self.folder / f"{stem}.crt", self.folder / f"{stem}.key"
        _write(key_path, _key_pem(key), private=True)
        _write(certificate_path, certificate.public_bytes(Encoding.PEM))
        return certificate_path, key_path

    def issued(self) -> list[Path]:
        """The certificates in the folder but for the authority's own. Raises CertificateError if there is none."""
        self._load()
        return sorted(path for path in self.folder.glob("*.crt") if path != self.certificate)

    def renew(self, path: Path, days: float = DAYS) -> None:
        """Replace a certificate in this folder, and its key, by new ones with the same names. Raises CertificateError.

        The two files are replaced one after the other; processes use the new ones once both are there.
        """
        try:
            old = x509.load_pem_x509_certificate(path.read_bytes())
            names = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            identity = Identity.parse(names.get_values_for_type(x509.UniformResourceIdentifier)[0])
        except (OSError, ValueError, IndexError, x509.ExtensionNotFound) as error:
            raise CertificateError("certificate", path, f"was not made by `prelude certs`: {error}") from error
        dns = [name for name in names.get_values_for_type(x509.DNSName) if name != identity.dns]
        addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
        self.issue(identity, hosts=[*dns, *addresses], days=days, stem=path.stem)

    def _load(self) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """The key, and its certificate of those in ca.crt, which has two while one authority replaces another."""
        try:
            certificates = x509.load_pem_x509_certificates(self.certificate.read_bytes())
            key = load_pem_private_key(self.key.read_bytes(), password=None)
        except OSError as error:
            path = Path(error.filename)
            raise CertificateError(
                "ca", path, f"cannot be read: {error.strerror}; `prelude certs init` makes an authority"
            ) from error
        except (ValueError, TypeError) as error:
            raise CertificateError("ca", self.certificate, f"or its key cannot be read: {error}") from error
        own = [each for each in certificates if each.public_key() == key.public_key()]
        if not own or not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertificateError("ca", self.key, f"is no key by `prelude certs init` of {self.certificate}")
        check_time("ca", self.certificate, own[0], dt.datetime.now(dt.UTC))
        return own[0], key


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    days: float,
    valid_from: dt.datetime | None = None,
) -> x509.CertificateBuilder:
    start = valid_from or dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - _BACKDATED)
        .not_valid_after(start + dt.timedelta(days=days))
    )


def _usage(**given: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(**given, **dict.fromkeys(others, False), encipher_only=False, decipher_only=False)


def _general_name(host: str) -> x509.GeneralName:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Replace a file at once, so that nobody reads half of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
