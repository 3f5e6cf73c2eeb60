"""A large request that other limits refuse, or that can never be admitted, costs the others little. In virtual time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest
from support.routers.callers import ACME, BETA, caller
from support.routers.sharing_routers import Database, Router

from cluster.config.quotas import QuotasConfig
from router.errors import QuotaExceeded, answer_of
from router.identity.access import Principal
from router.metrics import Metrics
from router.quotas.budget import Use
from router.quotas.quotas import Admission, Quotas

STEP_S = 0.1


class Clients:
    """Of one router; each request runs for two seconds."""

    def __init__(self, **config: Any) -> None:
        self.now = 1000.0
        self.quotas = Quotas(QuotasConfig.model_validate(config), Metrics(), clock=lambda: self.now)
        self._running: deque[tuple[float, Admission]] = deque()

    def step(self) -> None:
        self.now += STEP_S
        while self._running and self._running[0][0] <= self.now:
            self._running.popleft()[1].__exit__(None, None, None)

    def begin(self, who: Principal, use: Use, adapter: str | None = None) -> Admission:
        """Runs until it is ended."""
        admission = self.quotas.admission(who).__enter__()
        try:
            admission.take(use, adapter, None)
        except BaseException:
            admission.__exit__(None, None, None)
            raise
        return admission

    def is_admitted(self, who: Principal, use: Use, adapter: str | None = None) -> bool:
        try:
            admission = self.begin(who, use, adapter)
        except QuotaExceeded:
            return False
        admission.settle(use.prompt_tokens, use.output_tokens)
        self._running.append((self.now + 2.0, admission))
        return True


@pytest.mark.parametrize("num_sequences", [16, 17])
def test_tokens_are_for_others_while_sequences_refuse_the_large_request(num_sequences: int):
    """It can never be admitted, or not while one long stream runs. The rate permits ten small requests a second."""
    clients = Clients(default={"sequences": 16, "output_tokens_per_min": 60_000})
    clients.begin(ACME, Use(sequences=1))
    num_small = 0
    for number in range(6000):
        clients.step()
        num_small += sum(clients.is_admitted(ACME, Use(output_tokens=100)) for _ in range(2))
        if number % 40 == 0:
            assert not clients.is_admitted(ACME, Use(output_tokens=60_000, sequences=num_sequences))
    assert num_small * 100 >= 0.85 * (60_000 + 10 * 60_000)


def test_sequences_are_for_others_half_of_the_time_while_a_long_stream_runs():
    clients = Clients(default={"sequences": 16})
    stream = clients.begin(ACME, Use(sequences=1))
    num_small = 0
    for number in range(9600):
        clients.step()
        num_small += clients.is_admitted(ACME, Use(sequences=1))
        if number % 10 == 0:
            assert not clients.is_admitted(ACME, Use(sequences=16))
    assert num_small > 0.45 * 960 * 7.5  # fifteen, of two seconds each
    stream.__exit__(None, None, None)
    num_tries = 0
    while not clients.is_admitted(ACME, Use(sequences=16)):
        num_tries += 1
        for _ in range(10):
            clients.step()
            clients.is_admitted(ACME, Use(sequences=1))
    assert num_tries <= 150


def test_a_tenants_sequences_are_not_saved_for_what_its_key_never_permits():
    clients = Clients(default={"sequences": 16, "each_key": {"sequences": 1}})
    keys = [caller("acme", f"{number:012}") for number in range(31)]
    num_small = 0
    for number in range(1200):
        clients.step()
        num_small += clients.is_admitted(keys[number % 30], Use(sequences=1))
        if number % 10 == 0:
            assert not clients.is_admitted(keys[30], Use(sequences=16))
    assert num_small > 0.9 * 120 * 8


def test_of_several_routers_none_claims_sequences_for_what_its_key_never_permits():
    async def scenario() -> None:
        database = Database()
        config = QuotasConfig.model_validate({"default": {"sequences": 16, "each_key": {"sequences": 1}}})
        routers = [Router(database, config) for _ in range(2)]
        streams = []
        for number in range(300):
            database.now += STEP_S
            await routers[number % 2].sharing.renew()
            if number >= 50 and len(streams) < 16:
                admission = routers[number % 2].quotas.admission(caller("acme", f"{number:012}")).__enter__()
                try:
                    admission.take(Use(sequences=1), None, None)
                except QuotaExceeded:
                    admission.__exit__(None, None, None)
                else:
                    streams.append(admission)
            if number % 10 == 0:
                with routers[0].quotas.admission(caller("acme", "a" * 12)) as admission, pytest.raises(QuotaExceeded):
                    admission.take(Use(sequences=16), None, None)
            assert all(claim.units == 1 for claims in database.claims.values() for claim in claims.values())
        assert len(streams) == 16

    asyncio.run(scenario())


@pytest.mark.parametrize("each_adapter", [{"sequences": 1}, {"output_tokens_per_min": 1000}])
def test_an_adapters_sequences_are_not_saved_for_what_the_tenants_own_limit_refuses(each_adapter: dict[str, int]):
    adapter = "acme/bot"
    clients = Clients(
        default={}, tenants={"beta": {"each_adapter": each_adapter}}, adapters={adapter: {"sequences": 16}}
    )
    clients.is_admitted(BETA, Use(sequences=1, output_tokens=100), adapter)
    num_small = num_large = 0
    for number in range(1200):
        clients.step()
        num_small += clients.is_admitted(ACME, Use(sequences=1), adapter)
        if number % 10 == 0:
            num_large += clients.is_admitted(BETA, Use(sequences=16, output_tokens=100_000), adapter)
    assert num_large <= 1  # then it owes the tokens of an hour and a half
    assert num_small > 0.8 * 120 * 8


@pytest.mark.parametrize(
    ("limits", "use", "message"),
    [
        ({"sequences": 16}, Use(sequences=17), "tenant acme has a limit of sequences of 16 at a time, .* 17, so"),
        ({"sequences": 16, "output_tokens_per_min": 60}, Use(sequences=17, output_tokens=60), "asks for 17"),
        ({"sequences": 1, "each_key": {"sequences": 16}}, Use(sequences=17), "tenant acme"),
    ],
)
def test_a_request_that_can_never_be_admitted_is_told_so(limits: dict[str, Any], use: Use, message: str):
    clients = Clients(default=limits)
    who = caller("acme", "a" * 12)
    clients.is_admitted(who, Use(output_tokens=60, sequences=1))  # what it has taken is not the reason
    with pytest.raises(QuotaExceeded, match=message) as caught:
        clients.begin(who, use)
    answer = answer_of(caught.value)
    assert "never" in str(caught.value)
    assert (answer.status, answer.code) == (429, "rate_limit_exceeded")
    assert answer.headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & set(answer.headers)


def test_a_body_larger_than_the_limit_is_told_so():
    clients = Clients(default={"in_flight_bytes": 1024})
    with clients.quotas.admission(ACME) as admission:
        admission.take_bytes(1000)
        with pytest.raises(QuotaExceeded, match=r"in_flight_bytes of 1024 at a time.* asks for 1100.*never"):
            admission.take_bytes(100)
