"""The files of a process's certificate, and whether they can be used."""

import datetime as dt
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from process.certificates.expiry import Validity
from process.certificates.identity import CertificateError, Identity

_MAX_BYTES = 1024**2  # of a file
_RENEW = "renew it (`prelude certs renew`, or where you get your certificates)"


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """PEM files: a certificate with the chain that leads to the authority, its private key, the authorities."""

    certificate: Path
    key: Path
    ca: Path | None = None  # None: the process proves who it is, and asks nobody

    def __iter__(self) -> Iterator[Path]:
        return iter((self.certificate, self.key, *(() if self.ca is None else (self.ca,))))


@dataclass(frozen=True, slots=True)
class Checked:
    """What was found in files that can be used."""

    identity: Identity | None  # None: it names no process of a cluster, as a certificate for clients
    validity: Validity
    ca_validity: Validity | None  # of the authority that ends first


def check(files: CertificateFiles, now: float | None = None) -> Checked:
    """Read the files, and check that they belong together and are valid now. Raises CertificateError."""
    at = dt.datetime.fromtimestamp(time.time() if now is None else now, dt.UTC)
    chain = _certificates("certificate", files.certificate)
    leaf = chain[0]
    check_time("certificate", files.certificate, leaf, at)
    if _public_bytes(_key(files.key)) != _public_bytes(leaf):
        raise CertificateError("key", files.key, f"is not the private key of {files.certificate}; give the one that is")
    ca_validity = None
    if files.ca is not None:
        authorities = _certificates("ca", files.ca)
        valid = [each for each in authorities if each.not_valid_before_utc <= at < each.not_valid_after_utc]
        if not valid:
            check_time("ca", files.ca, authorities[0], at)
        if not _leads_to(leaf, chain[1:], valid):
            raise CertificateError(
                "certificate",
                files.certificate,
                f"was issued by {leaf.issuer.rfc4514_string()}, which is not among the authorities in {files.ca}; "
                "issue it by one of them, or add its authority to that file",
            )
        ca_validity = min(map(_validity, valid), key=lambda each: each.ends)
    try:  # as TLS reads them, which finds what the above does not look for
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        if files.ca is not None:
            context.load_verify_locations(files.ca)
    except (OSError, ssl.SSLError) as error:
        raise CertificateError("certificate", files.certificate, f"cannot be used for TLS: {error}") from error
    return Checked(_identity(leaf), _validity(leaf), ca_validity)


def check_identity(files: CertificateFiles, found: Checked, role: str, name: str | None) -> Identity:
    """The identity, which must be of this role and, unless None, this name. Raises CertificateError."""
    if found.identity is None:
        raise CertificateError(
            "certificate",
            files.certificate,
            f"names no process; it needs one URI among its alternative names, spiffe://TRUST-DOMAIN/{role}/"
            f"{name or 'NAME'}",
        )
    if found.identity.role != role or (name is not None and found.identity.name != name):
        raise CertificateError(
            "certificate",
            files.certificate,
            f"is the certificate of {found.identity}, and this is {role} {name or ''}".rstrip()
            + "; give each process its own (`prelude certs issue NAME` makes one)",
        )
    if found.identity.dns not in _dns_names(_certificates("certificate", files.certificate)[0]):
        raise CertificateError(
            "certificate",
            files.certificate,
            f"lacks the DNS name {found.identity.dns} among its alternative names, by which callers know it; add it",
        )
    return found.identity


def not_after(path: Path) -> dt.datetime:
    """When the first certificate of a file expires. Raises CertificateError."""
    return _certificates("certificate", path)[0].not_valid_after_utc


def _certificates(field: str, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read(field, path))
    except ValueError as error:
        raise CertificateError(field, path, f"has no certificate in PEM form: {error}") from error


def _key(path: Path) -> PrivateKeyTypes:
    try:
        return load_pem_private_key(_read("key", path), password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError("key", path, f"has no private key in PEM form without a password: {error}") from error


def _read(field: str, path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        remedy = "`prelude certs issue` makes one" if isinstance(error, FileNotFoundError) else "make it readable"
        raise CertificateError(field, path, f"cannot be read: {error.strerror}; {remedy}") from error
    if len(data) > _MAX_BYTES:
        raise CertificateError(field, path, f"has over {_MAX_BYTES} bytes, so it is no file of certificates")
    return data


def _validity(certificate: x509.Certificate) -> Validity:
    return Validity(certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp())


def check_time(field: str, path: Path, certificate: x509.Certificate, at: dt.datetime) -> None:
    """Raises CertificateError if the certificate is not valid then."""
    if at >= certificate.not_valid_after_utc:
        raise CertificateError(field, path, f"expired at {_shown(certificate.not_valid_after_utc)}; {_RENEW}")
    if at < certificate.not_valid_before_utc:
        raise CertificateError(
            field, path, f"is not valid before {_shown(certificate.not_valid_before_utc)}; check this host's clock"
        )


def _shown(time_: dt.datetime) -> str:
    return f"{time_:%Y-%m-%d %H:%M:%S} UTC"


def _public_bytes(owner: PrivateKeyTypes | x509.Certificate) -> bytes:
    return owner.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _leads_to(leaf: x509.Certificate, between: list[x509.Certificate], authorities: list[x509.Certificate]) -> bool:
    """Whether an authority issued the certificate, or one of those that lead to it."""
    current, seen = leaf, 0
    while seen <= len(between):
        if any(_is_issued_by(current, authority) for authority in authorities):
            return True
        issuer = next((each for each in between if _is_issued_by(current, each)), None)
        if issuer is None:
            return False
        current, seen = issuer, seen + 1
    return False


def _is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _identity(certificate: x509.Certificate) -> Identity | None:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return None
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    try:
        return Identity.parse(uris[0]) if len(uris) == 1 else None
    except ValueError:
        return None


def _dns_names(certificate: x509.Certificate) -> list[str]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [each.lower() for each in names.get_values_for_type(x509.DNSName)]
