"""Workers by DNS: the A and AAAA records of a name, or its SRV records, as those of a headless Kubernetes service."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdatatype
import dns.resolver

from cluster.discovery.source import Endpoint
from cluster.errors import SourceUnavailable
from process.addresses import host_and_port

_LOOKUP_S = 10.0  # for all questions of one refresh
_QUESTION_S = 5.0
_JITTER = 0.2  # of the interval, so that routers do not ask in step
_FIRST_RETRY_S = 1.0  # while nothing is known
_ABSENT_ANSWERS = 2  # in a row without an endpoint, before it has left: one answer may be incomplete
_MAX_TARGETS = 1024  # of SRV records
_MAX_QUESTIONS = 16  # concurrent

log = logging.getLogger(__name__)


class DnsSource:
    """The endpoints of one role behind one DNS name. A name that starts with an underscore has SRV records.

    "No such name" counts as an answer without endpoints; any other failure changes nothing.
    """

    def __init__(
        self,
        name: str,
        role: str,
        *,
        port: int | None = None,  # of agents; None: SRV records have it
        interval_s: float,
        nameservers: Sequence[tuple[str, int]] = (),  # (address, port); empty: those of this machine
        random: Random | None = None,
    ) -> None:
        self.label = f"DNS name {name}"
        self.roles = frozenset({role})
        self.endpoints: frozenset[Endpoint] = frozenset()
        self.has_answered = False
        self._name = name
        self._role = role
        self._port = port
        self._interval_s = interval_s
        self._nameservers = nameservers
        self._random = random or Random()
        self._num_absent: dict[Endpoint, int] = {}  # answers in a row without this known endpoint
        self._resolver: dns.asyncresolver.Resolver | None = None
        self._slots = asyncio.Semaphore(_MAX_QUESTIONS)

    async def refresh(self) -> None:
        """Ask once. Raises SourceUnavailable."""
        try:
            async with asyncio.timeout(_LOOKUP_S):
                found, is_whole = await (self._by_srv() if self._port is None else self._by_address())
        except (dns.exception.DNSException, OSError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_LOOKUP_S:g} s"
            raise SourceUnavailable(f"{self.label} cannot be looked up: {reason}") from error
        kept = self.endpoints - found
        if is_whole:
            absent = {endpoint: self._num_absent.get(endpoint, 0) + 1 for endpoint in kept}
            self._num_absent = {endpoint: count for endpoint, count in absent.items() if count < _ABSENT_ANSWERS}
            kept = frozenset(self._num_absent)
        self.endpoints = frozenset(found | kept)
        self.has_answered = True

    async def follow(self, on_change: Callable[[], None]) -> None:
        """Look the name up on the interval, with jitter, until cancelled."""
        is_failing = False
        while True:
            before = self.endpoints, self.has_answered
            try:
                await self.refresh()
            except SourceUnavailable as error:
                if not is_failing:
                    fields = {"source": self.label, "kept": len(self.endpoints), "reason": str(error)}
                    log.warning("workers cannot be looked up; keeping those that are known", extra={"fields": fields})
                is_failing = True
            else:
                _end_if_cancelled()
                if is_failing:
                    log.info("workers are looked up again", extra={"fields": {"source": self.label}})
                is_failing = False
            if before != (self.endpoints, self.has_answered):
                on_change()
            pause_s = self._interval_s if self.has_answered else min(self._interval_s, _FIRST_RETRY_S)
            await asyncio.sleep(pause_s * self._random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _by_address(self) -> tuple[frozenset[Endpoint], bool]:
        """The endpoints, and whether they are complete: not if one of the queries failed."""
        assert self._port is not None
        hosts, is_whole = await self._hosts(self._name)
        return frozenset(Endpoint(host_and_port(host, self._port), self._role) for host in hosts), is_whole

    async def _by_srv(self) -> tuple[frozenset[Endpoint], bool]:
        answer = await self._ask(self._name, "SRV")
        targets = sorted({(str(each.target), int(each.port)) for each in answer or () if str(each.target) != "."})
        if len(targets) > _MAX_TARGETS:
            log.error(
                "too many SRV records; using the first ones",
                extra={"fields": {"source": self.label, "records": len(targets), "used": _MAX_TARGETS}},
            )
            del targets[_MAX_TARGETS:]
        known = _added_hosts(answer)
        asked = sorted({target for target, _ in targets} - known.keys())
        answers = await asyncio.gather(*map(self._hosts, asked), return_exceptions=True)
        is_whole = True
        for target, hosts in zip(asked, answers, strict=True):
            if isinstance(hosts, BaseException):
                is_whole = False
                _raise_if_unexpected(hosts)
            else:
                known[target], is_target_whole = hosts
                is_whole = is_whole and is_target_whole
        found = {
            Endpoint(host_and_port(host, port), self._role)
            for target, port in targets
            for host in known.get(target, ())
            if port
        }
        return frozenset(found), is_whole

    async def _hosts(self, name: str) -> tuple[set[str], bool]:
        """IP addresses of a name, and whether both kinds of records answered. Raises if neither did."""
        answers = await asyncio.gather(self._ask(name, "A"), self._ask(name, "AAAA"), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            _raise_if_unexpected(failure)
        if len(failures) == len(answers):
            raise failures[0]
        records = [record for answer in answers if not isinstance(answer, BaseException) for record in answer or ()]
        return {host for record in records if (host := _usable(str(record.address)))}, not failures

    async def _ask(self, name: str, kind: str) -> dns.resolver.Answer | None:
        """The records of one kind; None if there are none."""
        async with self._slots:
            try:
                return await self._resolve(name, kind)
            except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
                return None

    def _resolve(self, name: str, kind: str) -> Awaitable[dns.resolver.Answer]:
        if self._resolver is None:
            resolver = dns.asyncresolver.Resolver(configure=not self._nameservers)
            if self._nameservers:
                resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in self._nameservers]
            resolver.use_edns(0, 0, 1232)  # longer answers come over TCP
            self._resolver = resolver
        return self._resolver.resolve(name, kind, lifetime=_QUESTION_S, search=True)


def _end_if_cancelled() -> None:
    """End a task whose cancellation was lost: `asyncio.wait_for`, which the library uses, may lose it before 3.12."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _added_hosts(answer: dns.resolver.Answer | None) -> dict[str, set[str]]:
    """IP addresses by target, if the server has added them to its answer, as Kubernetes' server does."""
    found: dict[str, set[str]] = {}
    for rrset in answer.response.additional if answer is not None else ():
        if rrset.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
            hosts = {host for record in rrset if (host := _usable(str(record.address)))}
            found.setdefault(str(rrset.name), set()).update(hosts)
    return found


def _usable(host: str) -> str:
    """The address in canonical form; empty for one that no agent can have."""
    address = ipaddress.ip_address(host)
    return "" if address.is_unspecified or address.is_multicast else str(address)


def _raise_if_unexpected(error: BaseException) -> None:
    if not isinstance(error, (dns.exception.DNSException, OSError)):
        raise error
