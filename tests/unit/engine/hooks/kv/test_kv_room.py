"""What a decode engine reserves for tokens to come."""

from types import SimpleNamespace

import pytest

from engine.hooks.kv import room as module
from engine.hooks.kv.room import bound_lengths, reserve_what_can_come

MOST = 512


def taken(may_generate: int, generated: int = 0, prompt: int = 10) -> SimpleNamespace:
    """A request that the engine has taken."""
    parameters = SimpleNamespace(max_new_tokens=may_generate)
    return SimpleNamespace(sampling_params=parameters, origin_input_ids=prompt * [3], output_ids=generated * [7])


def room(running=(), transferred=(), ready=(), waiting=("somebody",), retracted=(), page: int = 1) -> SimpleNamespace:
    """A queue of requests that wait for room, with what it reads of the engine."""
    return SimpleNamespace(
        num_reserved_decode_tokens=MOST,
        queue=list(waiting),
        retracted_queue=list(retracted),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page),
        transfer_queue=SimpleNamespace(queue=[SimpleNamespace(req=request) for request in transferred]),
        scheduler=SimpleNamespace(running_batch=SimpleNamespace(reqs=list(running)), waiting_queue=list(ready)),
    )


def sglang(queue, n_active=None, extra_reserved_reqs=0) -> int:
    """What the original answers: the most for each request."""
    if n_active is None:
        parts = (queue.scheduler.running_batch.reqs, queue.transfer_queue.queue, queue.scheduler.waiting_queue)
        n_active = sum(map(len, parts)) + extra_reserved_reqs
    return MOST * n_active


@pytest.mark.parametrize(
    ("queue", "fields", "tokens"),
    [
        (room([taken(64, generated=60)], [taken(100)], [taken(300, generated=1)]), {}, 4 + 100 + 299),
        (room([taken(10_000), taken(10_000, generated=9_999)]), {}, MOST + 1),
        (room([taken(8)]), {"extra_reserved_reqs": 2}, 8 + 2 * MOST),  # those that are just taken
        (room([taken(8, generated=9), taken(5)]), {}, 5),
        (room([taken(8)]), {"n_active": 1}, MOST),  # models with sliding windows, as in SGLang
        (room([taken(8)], waiting=()), {}, MOST),  # nobody waits
        (room([taken(8)], waiting=(), retracted=["somebody"]), {}, 8),
    ],
)
def test_requests_reserve_what_they_may_still_generate(queue: SimpleNamespace, fields: dict, tokens: int):
    assert reserve_what_can_come(sglang, queue, **fields) == tokens


@pytest.mark.parametrize(
    ("prompt", "generated", "may_generate", "pages"),
    [
        (10, 0, 6, 0),  # the rest fits in its first page
        (10, 0, 7, 1),
        (16, 0, 16, 1),
        (10, 7, 10, 1),  # 17 tokens, the newest of which may begin the second page
        (10, 8, 10, 0),
        (10, 20, 20, 0),
        (10, 0, 10_000, 32),  # the most is 512 tokens
    ],
)
def test_pages_are_reserved_whole(prompt, generated, may_generate, pages):
    request = taken(may_generate, generated, prompt=prompt)
    assert reserve_what_can_come(sglang, room(running=[request], page=16)) == 16 * pages


def lengths(size: int, page: int = 1, mode: str = "null", reserved: int = 512, context: int = 4096) -> tuple[int, int]:
    """The most tokens of a request and of its prompt."""
    worker = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(page_size=page)))
    sglangs = min(context - 1, size - 1)
    before, after = (size, 16384, 8, None), (42, "cpu", None, 8, context, size)
    mode, switches = ("prefill", True) if mode == "switching" else (mode, False)
    settings = SimpleNamespace(
        disaggregation_mode=mode, num_reserved_decode_tokens=reserved, enable_pd_role_switch=switches
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ResolvedSettings", lambda: settings)
        found = bound_lengths((*before, sglangs, sglangs - 5, *after), worker)
    assert (found[:4], found[6:]) == (before, after)
    return found[4:6]


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"size": 2048}, 2047),  # as SGLang has it
        ({"size": 2048, "mode": "prefill"}, 2047),
        ({"size": 2048, "page": 64}, 2048 - 128),
        ({"size": 2048, "page": 64, "mode": "prefill"}, 2048 - 128),
        ({"size": 2048, "mode": "decode"}, 2048 - 512),
        ({"size": 2048, "mode": "switching"}, 2048 - 512),  # in both roles, as clients are told once
        ({"size": 2048, "page": 64, "mode": "decode"}, 2048 - 512),
        ({"size": 2048, "page": 64, "mode": "decode", "reserved": 100}, 2048 - 128),
        ({"size": 100_000, "page": 64, "mode": "decode"}, 4095),  # the model's context
    ],
)
def test_no_request_is_longer_than_the_scheduler_takes(engine, expected):
    assert lengths(**engine) == (expected, expected - 5)


@pytest.mark.parametrize("engine", [{"size": 512, "mode": "decode"}, {"size": 128, "page": 64}])
def test_a_cache_without_room_for_a_prompt(engine):
    with pytest.raises(RuntimeError, match=f"{engine['size']} tokens, .* has no room for a prompt: give more"):
        lengths(**engine)
