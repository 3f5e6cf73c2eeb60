"""TLS contexts that follow their files: a certificate that is replaced serves the next handshake.

Files are looked at when there is a handshake, at most once a second. Those that cannot be used (half written, say,
expired, or of another process) change nothing: what was read before stays, and the log says why.
"""

import logging
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from process.certificates.expiry import Validity
from process.certificates.files import CertificateFiles, Checked, check, check_identity
from process.certificates.identity import CertificateError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_Made = TypeVar("_Made")


class Following(Generic[_Made]):
    """What `make` makes of files, and makes anew when they change. Thread-safe enough for handshakes of any thread."""

    def __init__(
        self,
        files: CertificateFiles,
        make: Callable[[CertificateFiles], _Made],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises CertificateError."""
        self.files = files
        self._make = make
        self._clock = clock
        self._signature = _signature(files)
        self.checked: Checked = check(files)
        self._made = make(files)
        self._looked_at = clock()
        self.version = 0  # how often it was made anew

    def current(self) -> _Made:
        """By the files as they are now, or as they were when they were last usable."""
        now = self._clock()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._look()
        return self._made

    def validity(self) -> Validity:
        """That of the certificate in use."""
        self.current()
        return self.checked.validity

    def _look(self) -> None:
        signature = _signature(self.files)
        if signature == self._signature:
            return
        fields = {"certificate": str(self.files.certificate)}
        try:
            checked = check(self.files)
            self._check_same(checked)
            made = self._make(self.files)
        except (CertificateError, OSError, ssl.SSLError) as error:
            log.error("changed certificate not used", extra={"fields": {**fields, "reason": str(error)}})
            return  # it is tried again at the next handshake: the other half of a pair may be on its way
        if _signature(self.files) != signature:
            return  # they are being replaced
        self.checked, self._made, self._signature = checked, made, signature
        self.version += 1
        log.info("certificate loaded again", extra={"fields": fields})

    def _check_same(self, found: Checked) -> None:
        """Raise CertificateError for the certificate of another process, as which nobody would look for this one."""
        own = self.checked.identity
        if self.files.ca is None or own is None:  # for clients, who look for a host's name
            return
        if (new := check_identity(self.files, found, own.role, own.name)) != own:
            domain = f"is of the trust domain {new.trust_domain}, and this process began in {own.trust_domain}"
            raise CertificateError("certificate", self.files.certificate, f"{domain}; restart it to change that")


def server_context(following: Following[ssl.SSLContext]) -> ssl.SSLContext:
    """A context for a server that hands each handshake on to the newest context."""
    context = following.current()

    def newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = following.current()

    context.sni_callback = newest  # type: ignore[assignment]  # called for clients that send no name, too
    return context


def make_server_context(files: CertificateFiles) -> ssl.SSLContext:
    """For a server. With authorities, clients must have a certificate of one of them."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    if files.ca is not None:
        context.load_verify_locations(files.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def make_client_context(files: CertificateFiles) -> ssl.SSLContext:
    """For calls with the process's own certificate to servers whose authority is in `files.ca`."""
    assert files.ca is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(files.ca)
    return context


def make_pinned_context(files: CertificateFiles) -> ssl.SSLContext:
    """For calls to a server on whichever address, if it has this very certificate."""
    context = ssl.create_default_context(cafile=files.certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _signature(files: Iterable[Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """Differs whenever a file was replaced or written; symbolic links are followed, as mounted secrets need."""
    found: list[tuple[int, int, int] | None] = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            found.append(None)
        else:
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)
