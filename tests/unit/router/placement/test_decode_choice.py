"""The decode worker of a pair: room first, then the domain, then the emptier of two."""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from support.routers.fleets import MAX_KV_TOKENS, PREFILLS, UP, fleet_of, warm_with

from router.fleet.fleet_state import WorkerView
from router.placement.placement import choose_decode
from router.placement.request import PlacementRequest, PromptSize

NAMES = [f"d{i}" for i in range(16)]
MANY = [WorkerView(name, "decode", incarnation=f"{name}-1", **UP) for name in NAMES]
P0 = warm_with(PREFILLS[0], *NAMES)


def request(kv_tokens: int = 1000, nonce: int = 0) -> PlacementRequest:
    return PlacementRequest(None, size=PromptSize(100, kv_tokens), nonce=nonce)


def in_domain(worker: WorkerView, domain: str) -> WorkerView:
    return replace(worker, domain=domain)


@pytest.mark.parametrize(
    ("domains", "num_sequences", "expected"),
    [
        (["", "", ""], {"d0": 2, "d1": 1, "d2": 3}, "d1"),
        (["a", "b", "a"], {"d0": 2, "d1": 0, "d2": 1}, "d2"),  # its own domain, though another is emptier
        (["a", "b", "b"], {"d0": 100, "d1": 5, "d2": 1}, "d2"),  # unless there is no room
        (["b", "", "b"], {"d1": 9}, "d1"),  # an unknown domain may be its own
    ],
)
def test_few_are_all_compared(domains: list[str], num_sequences: dict[str, int], expected: str) -> None:
    decodes = [in_domain(worker, domain) for worker, domain in zip(MANY, domains, strict=False)]
    prefill = in_domain(P0, "a" if any(domains) else "")
    chosen = choose_decode(request(), prefill, fleet_of(prefill, *decodes, **num_sequences))
    assert chosen.name == expected


def test_many_are_sampled_by_two_and_spread() -> None:
    random, fleet = Random(1), fleet_of(P0, *MANY)
    for _ in range(2000):
        chosen = choose_decode(request(nonce=random.getrandbits(32)), P0, fleet)
        fleet.loads[chosen.name].placed_kv_tokens += 100
    placed = Counter({name: fleet.loads[name].placed_kv_tokens // 100 for name in NAMES})
    assert max(placed.values()) - min(placed.values()) <= 12  # one random choice would leave about 60


def test_many_are_sampled_in_the_domain_and_retries_prefer_it_too() -> None:
    decodes = [in_domain(worker, "abcd"[i % 4]) for i, worker in enumerate(MANY)]
    prefill, random = in_domain(P0, "a"), Random(1)
    fleet = fleet_of(prefill, *decodes)

    def names(failed: set[str]) -> set[str]:
        nonces = [random.getrandbits(32) for _ in range(300)]
        return {choose_decode(request(nonce=n), prefill, fleet, lambda d: d.name not in failed).name for n in nonces}

    assert names(set()) == {"d0", "d4", "d8", "d12"}
    assert names({"d0"}) == {"d4", "d8", "d12"}
    assert names({"d0", "d4", "d8", "d12"}) == set(NAMES) - {"d0", "d4", "d8", "d12"}


def test_two_that_are_full_are_left_for_any_with_room() -> None:
    full = dict.fromkeys(NAMES[:-1], MAX_KV_TOKENS // 1000)
    chosen = choose_decode(request(), P0, fleet_of(P0, *MANY, **full))
    assert chosen.name == NAMES[-1]
