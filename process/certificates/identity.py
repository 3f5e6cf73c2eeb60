"""Who a process is, as its certificate says: a SPIFFE ID of a role and a name, and the DNS name that callers check."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROUTER, OPERATOR, TRAINER = "router", "operator", "trainer"
PAIR_ROLES = ("prefill", "decode")
SWITCHING = "switching"  # of workers that are prefill and decode workers in turns
WORKER_ROLES = (*PAIR_ROLES, SWITCHING, "unified")
ROLES = (ROUTER, *WORKER_ROLES, OPERATOR, TRAINER)
TRUST_DOMAIN = "prelude.local"  # of `prelude certs`, where no other is asked for

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_URI = re.compile(rf"spiffe://(?P<domain>[a-z0-9][a-z0-9._-]{{0,254}})/(?P<role>{'|'.join(ROLES)})/(?P<name>{_NAME})")


def certified_role(role: str, roles_change: bool) -> str:
    """The role in the certificate of a worker. With `role_changes`, one certificate is for both roles of a pair."""
    return SWITCHING if roles_change and role in PAIR_ROLES else role


@dataclass(frozen=True, slots=True)
class Identity:
    """One process: a router, a worker of some role, a trainer, or an operator's command line."""

    role: str
    name: str
    trust_domain: str = TRUST_DOMAIN

    @property
    def uri(self) -> str:
        """The SPIFFE ID, which is the certificate's one URI among its alternative names."""
        return f"spiffe://{self.trust_domain}/{self.role}/{self.name}"

    @property
    def dns(self) -> str:
        """The name that a caller asks TLS to find in the certificate, wherever the process listens."""
        return f"{self.name}.{self.role}.{self.trust_domain}".lower()

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Raises ValueError if it is no SPIFFE ID of a process of a cluster."""
        found = _URI.fullmatch(uri)
        if found is None:
            raise ValueError(f"{uri!r} is not spiffe://TRUST-DOMAIN/ROLE/NAME with a role of {', '.join(ROLES)}")
        return cls(found["role"], found["name"], found["domain"])

    def peer(self, role: str, name: str) -> Identity:
        """Another process of the same trust domain."""
        return Identity(role, name, self.trust_domain)

    def __str__(self) -> str:
        return f"{self.role} {self.name}"


class CertificateError(Exception):
    """A file of a certificate cannot be used. `field` is which: `certificate`, `key` or `ca`."""

    def __init__(self, field: str, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.field = field
        self.path = path
