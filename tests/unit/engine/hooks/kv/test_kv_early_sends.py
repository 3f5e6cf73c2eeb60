"""When a prefill engine sends KV, by SGLang's own loop and its own sends, with streams that record.

A stand-in for the GPU: what SGLang enqueues, and in which order, is real; that the order keeps answers right and is
faster shows on GPUs only (`tests/cluster/answers/test_pair_bfloat16.py` with PRELUDE_TEST_DEVICE=cuda).
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: SGLang's imports change much.
_CODE = """
import json, sys
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Prefill
from sglang.srt.managers.scheduler import Scheduler
from engine.hooks.kv import early_sends


class End(Exception):
    pass


class Batch(str):
    def copy(self):
        return self


def order(batches, hooked, **kind):
    events = []
    barrier = Scheduler._apply_war_barrier

    class Stand:
        pass

    scheduler = Stand()
    left = list(batches)

    def next_batch(**_):
        if not left:
            raise End
        name = left.pop(0)
        return SimpleNamespace(running_batch=None, batch_to_run=Batch(name) if name else None)

    def process(batch, result):
        events.append(f"results {batch}")
        if hooked:
            early_sends.wait_now(None, scheduler, batch, result)

    def run(batch):
        events.append(f"launch {batch}")
        scheduler.launched = batch
        return batch

    note = lambda what: lambda *args, **kwargs: events.append(what)
    wait = lambda *args: events.append(f"wait for {scheduler.launched}")
    vars(scheduler).update(
        request_receiver=SimpleNamespace(recv_requests=lambda: []),
        process_input_requests=lambda requests: None,
        _engine_paused=False,
        waiting_queue=[],
        disagg_prefill_bootstrap_queue=SimpleNamespace(pop_bootstrapped=lambda: []),
        get_next_disagg_prefill_batch_to_run=next_batch,
        running_batch=None,
        last_batch=None,
        chunked_req=None,
        ngram_embedding_manager=SimpleNamespace(prepare_for_forward=lambda batch, chunked_req: batch),
        enable_staging=False,
        run_batch=run,
        process_batch_result=process,
        on_idle=lambda: None,
        process_disagg_prefill_inflight_queue=note("transfers"),
        launch_batch_sample_if_needed=lambda *args: None,
        is_hybrid_swa=kind.get("swa", False),
        enable_hierarchical_cache=kind.get("hierarchical", False),
        _war_barrier_enabled=True,
        model_worker=SimpleNamespace(war_fastpath_runner=SimpleNamespace(war_fastpath_read_done_event=None)),
        schedule_stream=SimpleNamespace(wait_stream=wait, wait_event=wait),
        forward_stream=None,
    )
    if hooked:
        scheduler._apply_war_barrier = lambda: early_sends.put_off(barrier, scheduler)
    else:
        scheduler._apply_war_barrier = lambda: barrier(scheduler)
    try:
        Prefill.event_loop_overlap_disagg_prefill(scheduler)
    except End:
        return events


print(json.dumps([order(**each) for each in json.loads(sys.argv[1])]))
"""


def printed(code: str, *arguments: str) -> list:
    """What the code prints as JSON."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def orders(batches: list[str | None], *engines: dict[str, bool]) -> list[list[str]]:
    """What the loop of each engine enqueues for these batches (None: nothing to run)."""
    return printed(_CODE, json.dumps([{"batches": batches, **engine} for engine in engines]))


@pytest.mark.slow
def test_kv_of_a_batch_leaves_before_the_stream_waits_for_the_next():
    without, hooked, *others = orders(
        ["a", "b", None, "c"],
        {"hooked": False},
        {"hooked": True},
        {"hooked": True, "swa": True},
        {"hooked": True, "hierarchical": True},
    )
    first = ["launch a", "wait for a", "transfers"]  # nothing to send yet: the wait is where SGLang has it
    rest = ["results b", "transfers", "launch c", "wait for c", "transfers"]
    assert without == [*first, "launch b", "wait for b", "results a", "transfers", *rest]
    assert hooked == [*first, "launch b", "results a", "wait for b", "transfers", *rest]
    assert others == [without, without]


_FOUND_CODE = """
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin as Prefill
from engine.hooks.kv.early_sends import send_only_loaded_kv

original = Prefill.maybe_send_cached_prefix_chunk


def sent(send, hierarchical):
    found = []
    scheduler = SimpleNamespace(
        enable_hierarchical_cache=hierarchical,
        enable_staging=False,
        enable_overlap=False,
        token_to_kv_pool_allocator=SimpleNamespace(page_size=1),
        send_kv_chunk=lambda req, last_chunk, end_idx: found.append(end_idx),
    )
    # All of these tokens are in the cache: another prompt of the batch has begun to load them.
    req = SimpleNamespace(prefix_indices=[0] * 7, host_hit_length=0, start_send_idx=0, pending_bootstrap=False)
    send(scheduler, req)
    return found


def hooked(scheduler, req):
    return send_only_loaded_kv(original, scheduler, req)


print(json.dumps([sent(send, hierarchical) for send in (original, hooked) for hierarchical in (False, True)]))
"""


@pytest.mark.slow
def test_kv_that_a_hierarchical_cache_may_still_load_is_not_sent_ahead():
    plain, loading, plain_hooked, loading_hooked = printed(_FOUND_CODE)
    assert (plain, plain_hooked) == ([7], [7])
    assert (loading, loading_hooked) == ([7], [])
