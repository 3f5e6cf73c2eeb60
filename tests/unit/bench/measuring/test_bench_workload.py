"""Requests: the same for every system, none twice."""

from __future__ import annotations

from bench.measuring.workload import request


def test_prompts_all_differ_and_every_system_gets_the_same():
    seeds = [(2, repeat, adapters) for repeat in range(3) for adapters in (1, 8)]
    prompts = [tuple(request(seed, number, 8, 128, 1024).prompt) for seed in seeds for number in range(50)]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {128}
    assert min(map(min, prompts)) >= 16
    assert max(map(max, prompts)) < 1024
    assert request((2, 0, 1), 7, 8, 128, 1024) == request((2, 0, 1), 7, 8, 128, 1024)


def test_adapters_take_turns():
    assert [request((1,), number, 3, 4, 100).adapter for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert request((1,), 5, 0, 4, 100).adapter is None
