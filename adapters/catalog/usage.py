"""What tenants have used: the rows that routers write to the catalog's database, and what is asked about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from adapters.errors import AdapterError

MAX_GROUPS = 10_000  # of one answer
_MAX_DAYS = 31


class Subject(NamedTuple):
    """Whose use a row counts, and when."""

    hour: int  # since 1970, in UTC, in which the requests ended
    tenant: str  # as `Directory.lasting_name` has it
    key: str  # its id; empty: a token, or nobody asks for keys
    adapter: str  # its full name; empty: the base model
    revision: str
    model: str  # the base model's name


@dataclass(slots=True)
class Counts:
    """Requests whose clients were given an answer or a part of one, and the tokens of that."""

    requests: int = 0
    estimated_requests: int = 0  # streams that ended before their engines had counted
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts
    completion_tokens: int = 0
    router: str = ""  # of a row: who counts. The numbers of one only grow, so that the largest are the latest

    def add(self, other: Counts) -> None:
        """Count what `other` counts, too."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


GROUPS = Subject._fields
COUNTS = ("requests", "estimated_requests", "prompt_tokens", "cached_tokens", "completion_tokens")


class InvalidQuery(AdapterError):
    """A parameter has a wrong value."""

    code = "invalid_field"
    http_status = 400

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """Asks for sums over the hours in [start, end), one for each combination of `group_by`."""

    start: datetime
    end: datetime
    group_by: tuple[str, ...]  # of GROUPS
    tenants: tuple[str, ...] = ()  # a row's tenant must be each of these

    @classmethod
    def parse(cls, given: Mapping[str, str], now: datetime, viewer: str | None = None) -> UsageQuery:
        """Of `from`, `to`, `group_by` and `tenant`, by default the tenants' use in this month.

        `viewer`: the only tenant whose use may be seen; None: all. Raises InvalidQuery.
        """
        this_hour = now.replace(minute=0, second=0, microsecond=0)
        start = _hour(given, "from", this_hour.replace(day=1, hour=0))
        end = _hour(given, "to", this_hour + timedelta(hours=1))
        if start >= end:
            raise InvalidQuery("to", f"is {_shown(end)}, which is not after from, {_shown(start)}")
        if end - start > timedelta(days=_MAX_DAYS):
            raise InvalidQuery(
                "from",
                f"is {_shown(start)}, more than {_MAX_DAYS} days before to, {_shown(end)}; ask for each month alone",
            )
        names = given.get("group_by", "tenant").split(",")
        for name in names:
            if name not in GROUPS:
                raise InvalidQuery("group_by", f"has {name[:40]!r}; it is one or more of {','.join(GROUPS)}")
        tenant = given.get("tenant")
        if tenant is not None and not tenant.isprintable():  # not every database takes a NUL
            raise InvalidQuery("tenant", f"is {tenant[:80]!r}; it must have printable characters only")
        tenants = tuple(each for each in (viewer, tenant) if each is not None)
        return cls(start, end, tuple(dict.fromkeys(names)), tenants)

    @property
    def described(self) -> dict[str, Any]:
        """As answers begin."""
        return {"from": self.start, "to": self.end, "group_by": self.group_by}


def _hour(given: Mapping[str, str], param: str, default: datetime) -> datetime:
    text = given.get(param)
    if text is None:
        return default
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is not None and len(text) == len("2026-01-31"):
        found = found.replace(tzinfo=UTC)
    if found is None or found.utcoffset() != timedelta(0) or found.timestamp() % 3600:
        raise InvalidQuery(
            param, f"is {text[:40]!r}; it must be a whole hour in UTC, as 2026-01-31T13:00Z, or a day, as 2026-01-31"
        )
    return found.astimezone(UTC)


def _shown(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%MZ}"
