"""Bodies of the hooks that publish an engine's adapter tensors, its load and its signs of life."""

import functools
import logging
import math
import os
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.hooks.hook import SWITCHING, module_with
from engine.hooks.kv import role_change
from engine.hooks.report import REPORT_DIR_VARIABLE, ROLE_VARIABLE, report
from engine.hooks.settings import ResolvedSettings, check_role
from engine.vital_signs import Vitals

log = logging.getLogger(__name__)


def report_scheduler(result, scheduler):
    """Report this scheduler's hooks, role and adapters, at its start and when its role has changed.

    Raises ValueError for refused settings, and for adapters that a prefill engine has when it becomes a decode engine.
    """
    role, runner = os.environ[ROLE_VARIABLE], scheduler.tp_worker.model_runner
    manager = getattr(runner, "lora_manager", None)
    if switches := role == SWITCHING:
        role = role_change.begin_role(scheduler, manager)
        if role == "decode":  # the thread that is asked has ended, maybe without an answer
            _own_vitals(f"kv-{_rank()}").live()
    check_role(role, scheduler.tree_cache, ResolvedSettings(), switches=switches)
    own = report()
    own.process = f"scheduler-{_rank()}"
    own.role, own.kv_end_s = role, role_change.end_s
    own.lora_enabled = manager is not None
    own.num_adapters = len(manager.loras) if manager is not None else 0
    own.adapter_tensors = count_adapter_tensors(runner)
    own.write()
    return result


def count_adapter_tensors(runner) -> int:
    """Number of tensors for adapter weights: SGLang's slot buffers and the LoRA layers around base layers."""
    from sglang.srt.lora.layers import BaseLayerWithLoRA

    layers = sum(isinstance(module, BaseLayerWithLoRA) for module in runner.model.modules())
    manager = getattr(runner, "lora_manager", None)
    if manager is None:
        return layers
    pool = manager.memory_pool
    return layers + sum(len(buffers) for half in (pool.A_buffer, pool.B_buffer) for buffers in half.values())


_ASK_EVERY_S = 1.0
_LOG_EVERY_S = 10.0
_asked_at = 0.0
_KV_THREADS = ("bootstrap_thread_guarded", "decode_listener_thread")  # of prefill and of decode engines
_KV_QUESTION = [b"ABORT", b"-1"]  # the abort of a KV room that cannot exist
# Requests of the prompts that are being computed, by the id of the object, with the tokens that each had before.
_prefilling: dict[int, tuple[Any, int]] = {}


def live(_result, scheduler, _received):
    """Count a pass of the scheduler's loop. Every second, ask the parts that sleep until they get a message."""
    global _asked_at
    rank = _rank()
    _own_vitals(f"scheduler-{rank}").live()
    now = time.monotonic()
    if now - _asked_at < _ASK_EVERY_S:
        return
    _asked_at = now
    if scheduler.ipc_channels.send_to_detokenizer.socket is not None and _vitals("detokenizer").ask():
        from sglang.srt.managers.io_struct import ConfigureLoggingReq

        scheduler.ipc_channels.send_to_detokenizer.send_output(ConfigureLoggingReq())
    if scheduler.disaggregation_mode.value == "prefill" and _vitals(f"kv-{rank}").ask():
        manager = scheduler.disagg_prefill_bootstrap_queue.kv_manager
        _to_kv_thread(manager).send_multipart(_KV_QUESTION)


def detokenizer_answers(_result, _detokenizer, request):
    """Count the answer to the question of `live`: a change of the logging that changes nothing."""
    if request.log_level is None:
        _own_vitals("detokenizer").live()


def kv_thread_answers(original, manager, message):
    """Count the answer to the question of `live`; other messages take their usual way."""
    if message != _KV_QUESTION:
        return original(manager, message)
    _own_vitals(f"kv-{manager.kv_args.engine_rank}").live()
    return True


def with_kept_kv_thread(threading: Any) -> types.ModuleType:
    """`threading` for one module, in which the thread that takes decode engines' messages drops those it cannot take.

    Its function is one loop without state, so it is simply called again.
    """

    def thread(*args, target: Callable[..., Any] | None = None, **kwargs):
        if target is not None and getattr(target, "__name__", "") in _KV_THREADS:
            target = functools.partial(_call_again_after_errors, target)
        made = threading.Thread(*args, target=target, **kwargs)
        role_change.threads.append(made)
        return made

    return module_with(threading, Thread=thread)


def _call_again_after_errors(target: Callable[[], None]) -> None:
    import zmq

    num_dropped, logged_at = 0, -math.inf
    while True:
        try:
            return target()
        except zmq.ContextTerminated:  # the engine changes its role
            return None
        except Exception as error:  # noqa: BLE001 anything that a foreign message makes of it
            num_dropped += 1
            if (now := time.monotonic()) - logged_at >= _LOG_EVERY_S:
                log.warning("%d messages to the KV thread dropped, the last one: %s", num_dropped, type(error).__name__)
                num_dropped, logged_at = 0, now


def _rank() -> int:
    """This scheduler's tensor-parallel rank."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


@functools.cache
def _vitals(part: str) -> Vitals:
    return Vitals(Path(os.environ[REPORT_DIR_VARIABLE]), part)


@functools.cache
def _own_vitals(part: str) -> Vitals:
    vitals = _vitals(part)
    vitals.is_in_process(os.getpid())
    return vitals


_to_kv_thread_of: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _to_kv_thread(manager):
    """A socket of the scheduler's thread to the thread that takes decode engines' messages."""
    if manager not in _to_kv_thread_of:
        _to_kv_thread_of[manager] = role_change.socket_to(manager.local_ip, manager.rank_port)
    return _to_kv_thread_of[manager]


def publish_prefill(original, scheduler, batch, *args, **kwargs):
    """Publish the load with the prompts of this batch, which have left the queue and are in no count of SGLang's."""
    _own_vitals(f"scheduler-{_rank()}").ran_batch()
    if batch.forward_mode.is_extend():
        _prefilling.update((id(request), (request, len(request.output_ids))) for request in batch.reqs)
        scheduler.publish_load_snapshot(force=True)
    return original(scheduler, batch, *args, **kwargs)


def count_prefill(loads, inquirer):
    """Add prompts that are being computed to the running requests, and those whose KV is on its way to the queued.

    One that has got a token or has ended is in SGLang's own counts.
    """
    for key, (request, num_tokens) in list(_prefilling.items()):
        if len(request.output_ids) != num_tokens or request.finished():
            del _prefilling[key]
    running = set(map(id, inquirer.get_running_batch().reqs)) if _prefilling else ()
    loads.num_running_reqs += sum(key not in running for key in _prefilling)
    if loads.disaggregation is not None:
        loads.num_waiting_reqs += loads.disaggregation.prefill_inflight_queue_reqs
    return loads
