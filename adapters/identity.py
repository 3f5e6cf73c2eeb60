"""Adapter names, revision ids, scales, and references such as `tenant/name@alias`."""

import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from adapters.errors import InvalidReference

DEFAULT_TENANT = "default"
LATEST = "latest"
MAX_REFERENCE_LENGTH = 256  # two parts of 63, "@sha256:" and 64 hex digits fit

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_NAME = re.compile(rf"(?:(?P<tenant>{_PART})/)?(?P<name>{_PART})")
_ALIAS = re.compile(_PART)
_REVISION_ID = re.compile(r"sha256:[0-9a-f]{64}")
_SCALED_ID = re.compile(rf"(?P<revision>{_REVISION_ID.pattern})(?:x(?P<scale>[0-9.]{{1,4}}))?")
SCALE_STEPS, MAX_SCALE = 20, 2.0  # few: each scale of an adapter takes as much memory as another adapter
_NUMBER = re.compile(r"r([1-9][0-9]{0,8})")
_NAME_RULE = (
    "an adapter's name is `name` or `tenant/name`; each part has 1 to 63 letters, digits, '.', '_' or '-' "
    "and begins with a letter or digit"
)


def split_adapter_name(name: str) -> tuple[str, str]:
    """Split `name` or `tenant/name` into (tenant, name). Raises InvalidReference with the rule."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise InvalidReference(f"{_shown(name)} is not an adapter name: {_NAME_RULE}")
    return match["tenant"] or DEFAULT_TENANT, match["name"]


def is_tenant_name(text: str) -> bool:
    """True for what may stand before the slash of an adapter's name. ASCII, so no two names look alike."""
    return isinstance(text, str) and _ALIAS.fullmatch(text) is not None


def check_not_base_model(name: str, base_model: str) -> None:
    """Raise InvalidReference for the base model's name, with or without the default tenant."""
    if split_adapter_name(name) == (DEFAULT_TENANT, base_model):
        raise InvalidReference(f"{name!r} is the base model's name; choose another")


def full_name_of(tenant: str, name: str) -> str:
    """`tenant/name`, or `name` for the default tenant."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}/{name}"


def is_revision_id(text: str) -> bool:
    """True for "sha256:" and 64 lower-case hex digits."""
    return isinstance(text, str) and _REVISION_ID.fullmatch(text) is not None


def check_revision_id(text: str) -> None:
    """Raise InvalidReference, with the rule, unless `text` is a revision id."""
    if not is_revision_id(text):
        raise InvalidReference(f"{_shown(text)} is not a revision id: 'sha256:' and 64 lower-case hex digits")


def scaled_id(revision_id: str, scale: float) -> str:
    """What workers call a revision at a scale, from prefix-cache keys to slots: "sha256:…x0.5", or at 1 "sha256:…"."""
    return revision_id if scale == 1 else f"{revision_id}x{scale:g}"


def revision_of(scaled: str) -> str:
    """The revision id in a valid scaled id."""
    return scaled.partition("x")[0]


def split_scaled_id(text: str) -> tuple[str, float]:
    """The revision id and the scale. Raises InvalidReference; a revision at a scale has one id only."""
    if match := _SCALED_ID.fullmatch(text):
        with suppress(ValueError):
            scale = float(match["scale"] or 1)
            is_step = scale * SCALE_STEPS in range(1, int(MAX_SCALE * SCALE_STEPS) + 1)
            if is_step and scaled_id(match["revision"], scale) == text:
                return match["revision"], scale
    raise InvalidReference(
        f"{_shown(text)} is not a revision id, perhaps with a scale: 'sha256:', 64 lower-case hex digits, 'x', 0.5"
    )


def folder_of(scaled: str) -> str:
    """A folder name for a revision, also at a scale, safe on every file system. Raises InvalidReference."""
    split_scaled_id(scaled)
    return scaled.replace(":", "-")


@dataclass(frozen=True, slots=True)
class AdapterReference:
    """A parsed reference. At most one of alias, revision_id and number is set."""

    tenant: str
    name: str
    alias: str | None = LATEST
    revision_id: str | None = None
    number: int | None = None  # of `@r7`: the seventh revision of this adapter

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "name", "name@alias", "name@sha256:…" or "name@r7", each with an optional "tenant/" prefix."""
        if not isinstance(text, str):
            raise InvalidReference(f"an adapter reference is a string, not {type(text).__name__}")
        if len(text) > MAX_REFERENCE_LENGTH:
            raise InvalidReference(
                f"the adapter reference {_shown(text)} has {len(text)} characters; "
                f"at most {MAX_REFERENCE_LENGTH} are allowed"
            )
        full_name, at, pin = text.partition("@")
        tenant, name = split_adapter_name(full_name)
        if not at:
            return cls(tenant, name)
        if _REVISION_ID.fullmatch(pin):
            return cls(tenant, name, alias=None, revision_id=pin)
        if number := _NUMBER.fullmatch(pin):
            return cls(tenant, name, alias=None, number=int(number[1]))
        if _ALIAS.fullmatch(pin):
            return cls(tenant, name, alias=pin)
        raise InvalidReference(
            f"{_shown(pin)} in {_shown(text)} is neither an alias nor a revision: after '@' stands an alias, "
            "'r' and a number from 1, or 'sha256:' and 64 lower-case hex digits"
        )

    @property
    def full_name(self) -> str:
        """`tenant/name`, or `name` for the default tenant."""
        return full_name_of(self.tenant, self.name)

    def __str__(self) -> str:
        pin = self.revision_id or (f"r{self.number}" if self.number else self.alias)
        return self.full_name if pin == LATEST else f"{self.full_name}@{pin}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}…'"
