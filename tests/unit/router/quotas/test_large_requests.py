"""A large request beside many small ones gets its turn, at one router and at several, in virtual time."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

import pytest
from support.routers.callers import ACME
from support.routers.sharing_routers import STEP_S, Database, Router

from adapters.catalog.quota_leases import Claim, GaugeAsk, lease_in_turn
from cluster.config.quotas import QuotasConfig
from router.errors import QuotaExceeded
from router.quotas.bucket import Bucket
from router.quotas.budget import Use
from router.quotas.quotas import Admission

PER_S = 100  # tokens
SMALL, LARGE = Use(prompt_tokens=20), Use(prompt_tokens=3000)


def group(database: Database, count: int, **limits: float) -> list[Router]:
    """One router counts alone, several share."""
    made = [Router(database, QuotasConfig.model_validate({"default": limits})) for _ in range(count)]
    if count == 1:
        made[0].quotas.num_sharing = None
    return made


async def step(database: Database, routers: Sequence[Router], number: int) -> None:
    database.now += STEP_S
    if len(routers) > 1:
        await routers[number % len(routers)].sharing.renew()


def asks(router: Router, use: Use) -> float | None:
    """How long the router tells a request to wait; None: it is admitted, and ends."""
    try:
        with router.quotas.admission(ACME) as admission:
            admission.take(use, None, None)
            admission.settle(use.prompt_tokens, use.output_tokens)
    except QuotaExceeded as error:
        return error.retry_after_s or 0.0
    return None


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_large_request_beside_twice_what_the_rate_permits(num_routers: int):
    """Its client tries again when it was told to, as often as OpenAI's does where one router counts."""

    async def scenario() -> None:
        database = Database()
        routers = group(database, num_routers, prompt_tokens_per_min=60 * PER_S)
        num_small, num_tries, admitted_at, next_at, first_at = 0, 0, None, 1030.0, 1030.0
        for number in range(3000):
            await step(database, routers, number)
            for small in range(1, 3):  # 400 tokens a second
                num_small += asks(routers[small % num_routers], SMALL) is None
            if admitted_at is None and database.now >= next_at:
                num_tries += 1
                if (wait_s := asks(routers[0], LARGE)) is None:
                    admitted_at = database.now
                else:
                    next_at = database.now + math.ceil(wait_s)
        assert admitted_at is not None
        print(f"{num_routers} routers: {num_tries} tries, {admitted_at - first_at:.0f} s; {num_small} small ones")
        assert num_tries <= (3 if num_routers == 1 else 12)
        assert admitted_at - first_at <= 65 * num_routers  # saved at half the rate: 60 s
        used = 20 * num_small + 3000
        assert used == pytest.approx(60 * PER_S + 300 * PER_S, rel=0.05)

    asyncio.run(scenario())


def test_what_was_saved_for_a_client_that_does_not_return_is_for_others():
    bucket = Bucket(PER_S, 60 * PER_S, 0.0)
    bucket.take(60 * PER_S)
    bucket.reserve(1000, bucket.wait_s(1000))  # ten seconds, and five for its return
    bucket.refill(8)
    assert (bucket.level, bucket.saved) == (800, 400)
    assert bucket.wait_s(500) > 0 == bucket.wait_s(400)
    assert bucket.wait_s(1200) == pytest.approx(4)
    bucket.refill(16)
    assert (bucket.level, bucket.saved) == (1600, 0)
    assert bucket.wait_s(900) == 0


@pytest.mark.parametrize("num_routers", [1, 2])
def test_a_request_of_all_sequences_beside_single_ones(num_routers: int):
    async def scenario() -> None:
        database = Database()
        routers = group(database, num_routers, sequences=16)
        running: list[deque[tuple[float, Admission]]] = [deque() for _ in routers]
        tries, admitted_at, num_later = 0, None, 0

        def begin(number: int, sequences: int, ends_at: float) -> bool:
            admission = routers[number].quotas.admission(ACME).__enter__()
            try:
                admission.take(Use(sequences=sequences), None, None)
            except QuotaExceeded:
                admission.__exit__(None, None, None)
                return False
            running[number].append((ends_at, admission))
            return True

        for number in range(1200):
            await step(database, routers, number)
            for each in running:
                for _ in range(len(each)):
                    ends_at, admission = each.popleft()
                    if ends_at <= database.now:
                        admission.__exit__(None, None, None)
                    else:
                        each.append((ends_at, admission))
            for each in range(num_routers):  # of 16 at a time, 20 begin in the two seconds that each takes
                if begin(each, 1, database.now + 2.0) and admitted_at is not None:
                    num_later += 1
            if number >= 300 and admitted_at is None and number % 10 == 0:
                tries += 1
                if begin(0, 16, database.now + 2.0):
                    admitted_at = database.now
        assert admitted_at is not None
        print(f"{num_routers} routers: {tries} tries, a second apart")
        assert tries <= 30
        assert num_later > 200  # the others go on

    asyncio.run(scenario())


def test_claims_have_their_turn_in_the_order_of_their_waits():
    """Of two routers that hold nothing, the one whose large request has waited for longer gets all of the limit."""
    claims = {"one": Claim(16, since=2.0), "two": Claim(12, since=1.0)}
    asked = {who: GaugeAsk("s", 16, 0, 16, claim.units, due=claim.units) for who, claim in claims.items()}
    assert lease_in_turn("two", asked["two"], {"one": (16, 0)}, claims) == 12
    assert lease_in_turn("one", asked["one"], {"two": (16, 0)}, claims) <= 4
    assert lease_in_turn("one", asked["one"], {"two": (16, 0)}, {"one": claims["one"]}) == 16
    three = lease_in_turn("three", GaugeAsk("s", 16, 0, 4), {"one": (16, 0), "two": (16, 12)}, claims)
    assert three <= 4  # what the first claim leaves
