"""Usage in the catalog's database: rows that are set, sums of them, and questions that are refused."""

import sqlite3
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from adapters.catalog.sql import SqlCatalog, accounts
from adapters.catalog.usage import Counts, InvalidQuery, Subject, UsageQuery
from adapters.errors import CatalogUnavailable

HOUR = datetime(2026, 3, 29, 1, tzinfo=UTC)  # in which clocks of Central Europe are set forward


def subject(tenant: str = "acme", later: int = 0, adapter: str = "", **fields: str) -> Subject:
    hour = int(HOUR.timestamp()) // 3600 + later
    return Subject(hour, tenant, fields.get("key", "k1"), adapter, fields.get("revision", ""), "demo")


def counts(requests: int, tokens: int = 0, router: str = "r1") -> Counts:
    return Counts(requests, 0, tokens, 0, 2 * tokens, router)


def sums(catalog: SqlCatalog, **given: str) -> list[dict[str, Any]]:
    given = {"from": "2026-03-01", "to": "2026-04-01", **given}
    return catalog.usage.sums(UsageQuery.parse(given, HOUR))


def brief(found: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(each[name] for name in names) for each in found]


def test_rows_of_all_routers_add_up(catalog: SqlCatalog) -> None:
    catalog.usage.put([(subject(), Counts(1, 1, 10, 4, 20, "r1")), (subject("beta"), counts(5, 1))])
    catalog.usage.put([(subject(), Counts(2, 0, 30, 5, 2**40, "r2"))])  # more than 32 bits
    catalog.usage.put([])
    assert sums(catalog) == [
        {"tenant": "acme", "requests": 3, "estimated_requests": 1, "prompt_tokens": 40, "cached_tokens": 9,
         "completion_tokens": 2**40 + 20},
        {"tenant": "beta", "requests": 5, "estimated_requests": 0, "prompt_tokens": 1, "cached_tokens": 0,
         "completion_tokens": 2},
    ]  # fmt: skip


def test_a_row_is_set_and_not_added_to(catalog: SqlCatalog) -> None:
    for number in (1, 3, 3):
        catalog.usage.put([(subject(), counts(number, 10 * number))])
    assert brief(sums(catalog), "requests", "prompt_tokens") == [(3, 30)]
    # What a thread writes that hung while a later state was written.
    catalog.usage.put([(subject(), counts(2, 20)), (subject("beta"), counts(1))])
    assert brief(sums(catalog), "tenant", "requests", "prompt_tokens") == [("acme", 3, 30), ("beta", 1, 0)]


def test_a_commit_whose_outcome_is_unknown_is_repeated(catalog: SqlCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the connection breaks after the server has committed and before it has said so."""
    monkeypatch.setattr("adapters.catalog.sql.database.is_lost_connection", lambda _: True)

    def lose(connection: Any) -> None:
        connection.connection.dbapi_connection.commit()
        raise OperationalError("COMMIT", {}, sqlite3.OperationalError("the connection broke"))

    event.listen(catalog._writes, "commit", lose)
    with pytest.raises(CatalogUnavailable, match="whether the change was made is not known"):
        catalog.usage.put([(subject(), counts(2, 20))])
    event.remove(catalog._writes, "commit", lose)
    assert brief(sums(catalog), "requests") == [(2,)]  # it was made
    catalog.usage.put([(subject(), counts(2, 20))])
    catalog.usage.put([(subject(), counts(3, 30))])
    assert brief(sums(catalog), "requests", "prompt_tokens") == [(3, 30)]


def test_groups(catalog: SqlCatalog) -> None:
    rows = [
        (subject(adapter="acme/a", revision="sha256:1"), counts(1)),
        (subject(adapter="acme/a", revision="sha256:2"), counts(2)),
        (subject(later=1, key=""), counts(4)),
        (subject("beta", adapter="acme/a", revision="sha256:1"), counts(8)),
    ]
    catalog.usage.put(rows)

    def found(group_by: str) -> list[tuple[Any, ...]]:
        return brief(sums(catalog, group_by=group_by), *group_by.split(","), "requests")

    assert found("adapter") == [(None, 4), ("acme/a", 11)]
    assert found("tenant,adapter,revision") == [
        ("acme", None, None, 4), ("acme", "acme/a", "sha256:1", 1), ("acme", "acme/a", "sha256:2", 2),
        ("beta", "acme/a", "sha256:1", 8),
    ]  # fmt: skip
    assert found("key") == [(None, 4), ("k1", 11)]
    assert found("hour") == [(HOUR, 11), (HOUR + timedelta(hours=1), 4)]
    assert found("model,model") == [("demo", "demo", 15)]
    assert brief(sums(catalog, tenant="beta"), "requests") == [(8,)]


def test_every_hour_is_in_one_period(catalog: SqlCatalog) -> None:
    """Also where local clocks skip an hour, and at the ends of days and months."""
    for later in range(-30, 80):
        catalog.usage.put([(subject(later=later), counts(1))])
    ends = [
        "2026-03-27",
        "2026-03-29T01:00Z",
        "2026-03-29T02:00Z",
        "2026-03-29T03:00+00:00",
        "2026-04-01",
        "2026-04-03",
    ]
    parts = [sums(catalog, **{"from": start, "to": end}) for start, end in pairwise(ends)]
    assert [part[0]["requests"] for part in parts] == [30, 1, 1, 69, 9]
    assert sum(part[0]["requests"] for part in parts) == 110


def test_an_answer_is_bounded(catalog: SqlCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "MAX_GROUPS", 3)
    catalog.usage.put([(subject(f"t{number}", later=number % 2), counts(1)) for number in range(4)])
    with pytest.raises(InvalidQuery, match=r"^group_by is tenant, which gives more than 3 rows; ask for fewer groups"):
        sums(catalog)
    assert len(sums(catalog, group_by="hour")) == 2
    assert len(sums(catalog, tenant="t0")) == 1


def test_a_tenant_s_removal_leaves_what_it_used(catalog: SqlCatalog) -> None:
    catalog.keys.create("acme", "ci", {"infer"}, expires_at=None, by=None)
    catalog.usage.put([(subject(), counts(1))])
    catalog.tenants.remove("acme")
    assert brief(sums(catalog), "tenant", "requests") == [("acme", 1)]


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"from": "yesterday"}, "from", "from is 'yesterday'; it must be a whole hour in UTC, as 2026-01-31T13:00Z"),
        ({"to": "2026-03-01T13:30Z"}, "to", "to is '2026-03-01T13:30Z'"),
        ({"to": "2026-03-01T13:00:01Z"}, "to", "whole hour"),
        ({"from": "2026-03-01T13:00"}, "from", "UTC"),  # in which zone?
        ({"from": "2026-03-01T13:00+02:00"}, "from", "UTC"),
        ({"from": "2026-03-01T13:00 00:00"}, "from", "UTC"),  # a plus that nobody has escaped
        ({"from": "\0" + 1000 * "x"}, "from", "x'; it must be"),
        ({"to": ""}, "to", "to is ''"),
        (
            {"from": "2026-03-02", "to": "2026-03-02"},
            "to",
            "to is 2026-03-02T00:00Z, which is not after from, 20",
        ),
        ({"from": "2026-02-01", "to": "2026-03-05"}, "from", "more than 31 days before to, 2026-03-05T00:00Z; ask for"),
        ({"from": "0001-01-01", "to": "9999-12-31"}, "from", "more than 31 days"),
        ({"group_by": "tenant,salary"}, "group_by", "group_by has 'salary'; it is one or more of hour,tenant,key"),
        ({"group_by": ""}, "group_by", "group_by has ''"),
        ({"tenant": "a\0"}, "tenant", r"tenant is 'a\x00'; it must have printable characters only"),
    ],
)
def test_a_wrong_question_is_refused_by_value(given: dict[str, str], param: str, message: str) -> None:
    with pytest.raises(InvalidQuery) as caught:
        UsageQuery.parse(given, HOUR)
    assert caught.value.param == param
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def test_defaults() -> None:
    """This month, with the hour that has begun."""
    query = UsageQuery.parse({}, datetime(2026, 3, 31, 23, 59, 59, 999, tzinfo=UTC))
    assert (query.start, query.end) == (datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 4, 1, tzinfo=UTC))
    assert (query.group_by, query.tenants) == (("tenant",), ())
    assert UsageQuery.parse({"tenant": "beta"}, HOUR, "acme").tenants == ("acme", "beta")
