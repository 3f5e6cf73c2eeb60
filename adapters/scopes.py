"""What a key, or a token of an issuer, permits."""

from enum import StrEnum


class Scope(StrEnum):
    """One right. `admin` includes all others, for every tenant; the others hold within the holder's tenant."""

    INFER = "infer"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"
    WORKERS_OPERATE = "workers:operate"
    TRAIN = "train"
    ADMIN = "admin"


class Permission(StrEnum):
    """What a tenant may do with another tenant's adapter. Neither includes the other."""

    READ = "read"  # show it, its history and its files
    INFER = "infer"  # name it in requests


def parse_scope(text: str) -> Scope:
    """Raises ValueError, which names the scopes that there are."""
    try:
        return Scope(text)
    except ValueError:
        known = ", ".join(Scope)
        raise ValueError(f"{text!r} is not a scope; choose from {known}") from None
