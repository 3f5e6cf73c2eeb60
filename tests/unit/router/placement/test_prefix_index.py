"""The prefix index: what it believes, how much it remembers."""

from dataclasses import replace

import pytest
from support.routers.fleets import DECODES, PREFILLS

from router.fleet.worker_loads import WorkerLoads
from router.placement import prefix_index
from router.placement.placer import Placer
from router.placement.prefix_index import PrefixIndex
from router.placement.request import Placement, PlacementRequest, PromptSize


def request(*blocks: int, revision: str | None = "r", namespace: str = "") -> PlacementRequest:
    return PlacementRequest(revision, size=PromptSize(100 * len(blocks) + 50, 0, blocks, 100.0), namespace=namespace)


def test_the_longest_common_beginning_counts() -> None:
    index = PrefixIndex()
    index.add(request(1, 2, 3), "p0", "a")
    index.add(request(1, 2, 4), "p1", "b")
    assert index.workers(request(1, 9)) == {"p0", "p1"}
    assert index.workers(request(2)) == index.workers(request()) == set()
    tokens = {name: index.cached_tokens(request(1, 2, 4, 5), name, life) for name, life in (("p0", "a"), ("p1", "b"))}
    assert tokens == {"p0": 200, "p1": 300}
    assert index.cached_tokens(request(1, 2, 3, revision=None), "p0", "a") == 0
    assert index.cached_tokens(request(1, 2, 3), "p0", "b") == 0


@pytest.mark.parametrize("revision", ["r", None])
def test_namespaces_are_apart_as_in_the_engines(revision: str | None) -> None:
    index = PrefixIndex()
    acme, beta = (request(1, 2, revision=revision, namespace=tenant) for tenant in ("acme", "beta"))
    index.add(acme, "p0", "a")
    assert index.cached_tokens(acme, "p0", "a") == 200
    assert index.cached_tokens(beta, "p0", "a") == 0
    assert (index.workers(acme), index.workers(beta)) == ({"p0"}, set())


def test_a_worker_that_left_is_forgotten() -> None:
    index = PrefixIndex()
    for worker in ("p0", "p1"):
        index.add(request(1), worker, "a")
    index.add(request(2), "p0", "a")
    index.forget("p0")
    index.forget("p9")
    assert index.cached_tokens(request(1), "p0", "a") == 0
    assert (index.workers(request(1)), index.workers(request(2))) == ({"p1"}, set())


def test_its_memory_is_bounded_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_MAX_BLOCKS", 100)
    monkeypatch.setattr(prefix_index, "_MAX_FIRST_BLOCKS", 50)
    index = PrefixIndex()
    for block in range(0, 300, 2):
        index.add(request(block, block + 1), "p0", "a")
        index.add(request(0, 1), "p0", "a")  # used again and again
    assert len(index._workers["p0"].blocks) == 100
    assert len(index._by_first_block) == 50
    assert (index.workers(request(0)), index.workers(request(2))) == ({"p0"}, set())
    assert index.cached_tokens(request(0, 1), "p0", "a") == 200
    assert index.cached_tokens(request(2, 3), "p0", "a") == 0
    assert index.cached_tokens(request(298, 299), "p0", "a") == 200
    index.add(request(300), "p0", "restarted")
    assert (index.workers(request(0)), index.workers(request(300))) == (set(), {"p0"})


def test_answers_teach_it_how_much_an_engine_keeps() -> None:
    index = PrefixIndex()
    for block in range(2000):
        index.add(request(block), "p0", "a")
    for _ in range(20):
        index.observe("p0", expected_tokens=100, cached_tokens=0)
    index.add(request(5000), "p0", "a")
    shrunk = len(index._workers["p0"].blocks)
    assert shrunk < 500
    assert index.cached_tokens(request(1), "p0", "a") == 0
    assert index.cached_tokens(request(1999), "p0", "a") == 100  # the newest are the last to be doubted
    for _ in range(200):
        index.observe("p0", expected_tokens=100, cached_tokens=90)
    for block in range(3000):
        index.add(request(10_000 + block), "p0", "a")
    assert len(index._workers["p0"].blocks) > 2 * shrunk
    index.observe("p9", expected_tokens=100, cached_tokens=0)
    index.observe("p0", expected_tokens=0, cached_tokens=0)


def test_what_an_engine_is_still_reading_is_not_expected_in_its_cache() -> None:
    """A burst of equal prompts finds nothing there, which says nothing of how much the engine keeps."""
    loads = WorkerLoads(lambda: 0.0)
    placer = Placer(loads, clock=lambda: 0.0)
    worker = Placement(PREFILLS[0], DECODES[0])
    index, prompt = placer.policy.prefixes, request(1, 2)
    burst = [placer.take(prompt, worker) for _ in range(10)]
    assert index.cached_tokens(prompt, "p0", "p0-1") == 200  # the next one goes there, too
    for placed in burst:
        placer.found_cached(placed, 0)
    assert index._workers["p0"].max_blocks == prefix_index._MAX_BLOCKS
    placer.found_cached(placer.take(prompt, worker), 0)  # now it had read them
    assert index._workers["p0"].max_blocks < prefix_index._MAX_BLOCKS
    restarted = replace(PREFILLS[0], incarnation="p0-2")
    placer.take(prompt, Placement(restarted, DECODES[0]))
    placer.found_cached(burst[0], 0)  # of the engine before
    assert placer.take(prompt, Placement(restarted, DECODES[0])).expected_cached_tokens == 0
