"""Workers by DNS: the A and AAAA records of a name, as of a headless Kubernetes service."""

import asyncio
import ipaddress
import logging
import random
from collections.abc import Callable, Sequence

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver

from cluster.discovery.source import Endpoint
from cluster.errors import SourceUnavailable
from process.addresses import host_and_port

_LOOKUP_S = 10.0  # for all questions of one refresh
_QUESTION_S = 5.0
_JITTER = 0.2  # of the interval, so that routers do not ask in step
_FIRST_RETRY_S = 1.0  # while nothing is known
_ABSENT_ANSWERS = 2  # in a row without an endpoint, before it has left: one answer may be incomplete

log = logging.getLogger(__name__)


class DnsSource:
    """The endpoints of one role behind one DNS name.

    "No such name" counts as an answer without endpoints; any other failure changes nothing.
    """

    def __init__(
        self,
        name: str,
        role: str,
        *,
        port: int,  # of agents
        interval_s: float,
        nameservers: Sequence[tuple[str, int]] = (),  # (address, port); empty: those of this machine
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
        self._num_absent: dict[Endpoint, int] = {}  # answers in a row without this known endpoint
        self._resolver: dns.asyncresolver.Resolver | None = None

    async def refresh(self) -> None:
        """Ask once. Raises SourceUnavailable."""
        try:
            async with asyncio.timeout(_LOOKUP_S):
                hosts, is_whole = await self._hosts()
        except (dns.exception.DNSException, OSError, TimeoutError) as error:
            self._resolver = None  # the host's nameservers may be others now
            reason = str(error) or f"no answer within {_LOOKUP_S:g} s"
            raise SourceUnavailable(f"{self.label} cannot be looked up: {reason}") from error
        found = frozenset(Endpoint(host_and_port(host, self._port), self._role) for host in hosts)
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
            await asyncio.sleep(pause_s * random.uniform(1 - _JITTER, 1 + _JITTER))

    async def _hosts(self) -> tuple[set[str], bool]:
        """IP addresses of the name, and whether both kinds of records answered. Raises if neither did."""
        answers = await asyncio.gather(self._ask("A"), self._ask("AAAA"), return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        for failure in failures:
            if not isinstance(failure, (dns.exception.DNSException, OSError)):
                raise failure
        if len(failures) == len(answers):
            raise failures[0]
        records = [record for answer in answers if not isinstance(answer, BaseException) for record in answer or ()]
        return {host for record in records if (host := _usable(str(record.address)))}, not failures

    async def _ask(self, kind: str) -> dns.resolver.Answer | None:
        """The records of one kind; None if there are none."""
        if self._resolver is None:
            resolver = dns.asyncresolver.Resolver(configure=not self._nameservers)
            if self._nameservers:
                resolver.nameservers = [dns.nameserver.Do53Nameserver(host, port) for host, port in self._nameservers]
            resolver.use_edns(0, 0, 1232)  # longer answers come over TCP
            self._resolver = resolver
        try:
            return await self._resolver.resolve(self._name, kind, lifetime=_QUESTION_S, search=True)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None


def _end_if_cancelled() -> None:
    """End a task whose cancellation was lost: `asyncio.wait_for`, which the library uses, may lose it before 3.12."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _usable(host: str) -> str:
    """The address in canonical form; empty for one that no agent can have."""
    address = ipaddress.ip_address(host)
    return "" if address.is_unspecified or address.is_multicast else str(address)
