"""What a router keeps of usage until the database has it, and what it writes: nothing is lost or counted twice."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.routers.virtual_time import Clock

from adapters.catalog.usage import Counts, Subject
from adapters.errors import CatalogUnavailable
from router.quotas import usage as module
from router.quotas.usage import Usage


class Table:
    """As the database's: a row is set, unless what is there came later."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Subject, str], Counts] = {}
        self.puts: list[int] = []  # rows of each
        self.error: Exception | None = None
        self.is_written_all_the_same = False
        self.put_again = asyncio.Event()

    async def put(self, rows: Sequence[tuple[Subject, Counts]]) -> None:
        self.put_again.set()
        if self.error is None or self.is_written_all_the_same:
            self.puts.append(len(rows))
            for subject, counts in rows:
                there = self.rows.get((subject, counts.router))
                if there is None or counts.requests > there.requests:
                    self.rows[subject, counts.router] = replace(counts)
        if self.error is not None:
            raise self.error

    @property
    def num_requests(self) -> int:
        return sum(counts.requests for counts in self.rows.values())


def subject(usage: Usage, tenant: str = "acme") -> Subject:
    return Subject(int(usage.clock() // 3600), tenant, "", "", "", "demo")


def use(usage: Usage, tenant: str = "acme", number: int = 1) -> None:
    for _ in range(number):
        counts = usage.rows[subject(usage, tenant)]
        counts.requests += 1
        counts.prompt_tokens += 7


async def test_only_what_has_changed_is_written() -> None:
    table, clock = Table(), Clock(0)
    usage = Usage(table.put, clock)
    use(usage), use(usage, "beta")
    assert await usage.flush()
    assert await usage.flush()
    use(usage, number=2)
    assert await usage.flush()
    assert table.puts == [2, 1]
    assert {key[0].tenant: (row.requests, row.prompt_tokens) for key, row in table.rows.items()} == {
        "acme": (3, 21),
        "beta": (1, 7),
    }
    assert len(table.rows) == 2  # one row an hour


async def test_a_database_that_is_away_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    table, clock = Table(), Clock(0)
    usage = Usage(table.put, clock)
    table.error = CatalogUnavailable("away")
    for _ in range(5):  # hours
        use(usage)
        assert not await usage.flush()
        clock.now += 3600
    assert [record.__dict__["fields"]["rows"] for record in caplog.records] == [1, 2, 3, 4, 5]
    table.error = None
    assert await usage.flush()
    assert sorted(key[0].hour for key in table.rows) == [0, 1, 2, 3, 4]
    assert table.num_requests == 5
    assert not usage.rows  # of hours that are over
    table.error = ValueError("a row with something in it")
    use(usage)
    assert not await usage.flush()
    assert "something" not in str([record.__dict__["fields"] for record in caplog.records])


async def test_an_unknown_outcome_counts_once() -> None:
    table = Table()
    usage = Usage(table.put, Clock(0))
    table.error, table.is_written_all_the_same = CatalogUnavailable("unknown"), True
    use(usage)
    assert not await usage.flush()
    use(usage)
    assert not await usage.flush()
    table.error = None
    assert await usage.flush()
    assert table.num_requests == 2


async def test_what_is_used_during_a_write_is_written_next() -> None:
    table = Table()

    async def put(rows: Sequence[tuple[Subject, Counts]]) -> None:
        use(usage)
        clock.now += 3600  # and the hour is over before the write is
        await table.put(rows)

    clock = Clock(0)
    usage = Usage(put, clock)
    use(usage)
    assert await usage.flush()
    assert table.num_requests == 1
    put_of_table = usage._put
    usage._put = table.put
    assert put_of_table is put
    assert await usage.flush()
    assert table.num_requests == 2


async def test_a_clock_that_is_set_back_loses_nothing() -> None:
    table, clock = Table(), Clock(7200)
    usage = Usage(table.put, clock)
    use(usage, number=5)
    assert await usage.flush()
    clock.now += 3600
    use(usage)
    assert await usage.flush()  # forgets the hour before
    clock.now -= 3600
    use(usage, number=2)
    assert await usage.flush()
    assert table.num_requests == 8


async def test_each_process_has_its_own_rows() -> None:
    """So a restart sets no row of the process before."""
    table, clock = Table(), Clock(0)
    for _ in range(3):
        usage = Usage(table.put, clock)
        use(usage, number=2)
        assert await usage.flush()
    assert table.num_requests == 6


async def test_many_rows_are_written_in_parts_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 10)
    monkeypatch.setattr(module, "MAX_ROWS", 40)
    table = Table()
    usage = Usage(table.put, Clock(0))
    for number in range(25):
        use(usage, f"t{number}")
    assert await usage.flush()
    assert table.puts == [10, 10, 5]
    assert not usage.rows
    use(usage, "t0")
    assert await usage.flush()
    assert table.num_requests == 26


async def test_it_is_written_again_and_again_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_FLUSH_S", 0.01)
    table = Table()
    usage = Usage(table.put, Clock(0))
    async with usage.running():
        for number in (1, 2):
            table.put_again.clear()
            use(usage)
            await table.put_again.wait()
            assert table.num_requests == number
        table.put_again.clear()
        table.error = CatalogUnavailable("away")
        use(usage)
        await table.put_again.wait()
        monkeypatch.setattr(module, "_FLUSH_S", 3600)
        table.error = None
    assert table.num_requests == 3
    table.error = CatalogUnavailable("away")
    with caplog.at_level(logging.ERROR):
        async with usage.running():
            use(usage)
    assert caplog.records[-1].__dict__["fields"] == {"rows": 1, "reason": "away"}
