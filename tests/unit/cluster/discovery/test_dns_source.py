"""Workers by DNS, asked of a real server on loopback."""

import asyncio
import logging

import dns.rcode
import pytest
from support.clusters.dns_server import DnsServer, dns_server

from cluster.discovery import dns as dns_source
from cluster.discovery.dns import DnsSource
from cluster.discovery.source import Endpoint
from cluster.errors import SourceUnavailable

NAME = "prefill.example.org"


def source_of(server: DnsServer, *, interval_s: float = 0.05) -> DnsSource:
    return DnsSource(NAME, "prefill", port=9000, interval_s=interval_s, nameservers=[server.nameserver])


def found(source: DnsSource) -> set[str]:
    assert all((each.role, each.name) == ("prefill", "") for each in source.endpoints)
    return {endpoint.address for endpoint in source.endpoints}


async def test_addresses_of_both_kinds() -> None:
    async with dns_server() as server:
        server.set_addresses(NAME, ["10.0.0.1", "10.0.0.2", "fd00::1", "0.0.0.0", "224.0.0.1"])
        source = source_of(server)
        assert not source.has_answered
        await source.refresh()
        assert found(source) == {"10.0.0.1:9000", "10.0.0.2:9000", "[fd00::1]:9000"}
        assert source.has_answered


async def test_an_answer_too_long_for_udp() -> None:
    async with dns_server() as server:
        server.set_addresses(NAME, [f"10.0.{number}.1" for number in range(200)])
        source = source_of(server)
        await source.refresh()
        assert len(found(source)) == 200
        assert server.num_by_tcp == 1


async def test_an_endpoint_leaves_after_two_answers_without_it() -> None:
    async with dns_server() as server:
        server.set_addresses(NAME, ["10.0.0.1", "10.0.0.2"])
        source = source_of(server)
        await source.refresh()
        server.set_addresses(NAME, ["10.0.0.2", "10.0.0.3"])
        await source.refresh()
        assert found(source) == {"10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000"}
        server.set_addresses(NAME, ["10.0.0.1", "10.0.0.2"])
        await source.refresh()  # .1 is back, .3 was absent once
        server.set_addresses(NAME, [])
        await source.refresh()  # .3 was absent twice; no such name counts as an answer
        assert found(source) == {"10.0.0.1:9000", "10.0.0.2:9000"}
        await source.refresh()
        assert found(source) == set()


@pytest.mark.parametrize("failure", [dns.rcode.SERVFAIL, dns.rcode.REFUSED, "silent"])
async def test_an_outage_keeps_what_is_known(failure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_source, "_LOOKUP_S", 0.3)

    async with dns_server() as server:
        server.set_addresses(NAME, ["10.0.0.1"])
        source = source_of(server)
        await source.refresh()
        server.is_silent = failure == "silent"
        server.rcode = dns.rcode.NOERROR if server.is_silent else failure
        for _ in range(3):
            with pytest.raises(SourceUnavailable, match=f"DNS name {NAME} cannot be looked up: "):
                await source.refresh()
        assert found(source) == {"10.0.0.1:9000"}
        async with dns_server() as other:  # which resolv.conf names from now on
            other.set_addresses(NAME, ["10.0.0.2"])
            source._nameservers = [other.nameserver]
            await source.refresh()
        assert found(source) == {"10.0.0.1:9000", "10.0.0.2:9000"}


async def test_half_an_answer_adds_but_removes_nothing() -> None:
    async with dns_server() as server:
        server.set_addresses(NAME, ["10.0.0.1", "fd00::1"])
        source = source_of(server)
        await source.refresh()
        server.failing_kinds = {"AAAA"}
        server.set_addresses(NAME, ["10.0.0.2"])
        for _ in range(3):
            await source.refresh()
        assert found(source) == {"10.0.0.1:9000", "10.0.0.2:9000", "[fd00::1]:9000"}
        server.failing_kinds = set()
        for _ in range(2):
            await source.refresh()
        assert found(source) == {"10.0.0.2:9000"}


async def test_following_tells_of_changes_only_and_logs_an_outage_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async with dns_server() as server:
        source, seen = source_of(server), []
        changed = asyncio.Event()

        def on_change() -> None:
            seen.append(found(source))
            changed.set()

        async def next_change() -> None:
            async with asyncio.timeout(120):
                await changed.wait()
            changed.clear()

        following = asyncio.create_task(source.follow(on_change))
        await next_change()  # the first answer: there is nobody
        server.set_addresses(NAME, ["10.0.0.1"])
        await next_change()
        server.rcode = dns.rcode.SERVFAIL
        await server.questions(8)
        server.rcode = dns.rcode.NOERROR
        await server.questions(4)
        server.set_addresses(NAME, ["10.0.0.2"])
        await next_change()
        await next_change()
        following.cancel()
        assert seen == [set(), {"10.0.0.1:9000"}, {"10.0.0.1:9000", "10.0.0.2:9000"}, {"10.0.0.2:9000"}]
        texts = [record.getMessage() for record in caplog.records if "looked up" in record.getMessage()]
        assert texts == ["workers cannot be looked up; keeping those that are known", "workers are looked up again"]


async def test_the_interval_has_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 50:
            raise asyncio.CancelledError

    async with dns_server() as server:
        source = source_of(server, interval_s=10.0)
        monkeypatch.setattr(dns_source.asyncio, "sleep", sleep)
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(asyncio.CancelledError):
            await source.follow(lambda: None)
        assert all(0.8 <= pause <= 1.2 for pause in pauses)  # sooner while nothing is known
        pauses.clear()
        server.rcode = dns.rcode.NOERROR
        with pytest.raises(asyncio.CancelledError):
            await source.follow(lambda: None)
        assert all(8 <= pause <= 12 for pause in pauses)
        assert max(pauses) - min(pauses) > 1


async def test_the_machines_own_resolver(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `nameservers`, those of /etc/resolv.conf, with its search list."""

    async with dns_server() as server:
        (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\nsearch example.org\n")
        source = DnsSource("prefill", "prefill", port=9000, interval_s=1)
        made = dns_source.dns.asyncresolver.Resolver

        def of_the_test(configure: bool):
            assert configure
            resolver = made(str(tmp_path / "resolv.conf"))
            resolver.port = server.port
            return resolver

        monkeypatch.setattr(dns_source.dns.asyncresolver, "Resolver", of_the_test)
        server.set_addresses(NAME, ["10.0.0.1"])
        await source.refresh()
        assert source.endpoints == {Endpoint("10.0.0.1:9000", "prefill")}
