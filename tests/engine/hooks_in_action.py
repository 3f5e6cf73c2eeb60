# ruff: noqa: E402 the environment and the CPU support come first
"""Prints, in a separate process, what each hook's target does before and after installation, as JSON."""

from __future__ import annotations

import json
import os
import sys
import threading
import types
from pathlib import Path

os.environ["PRELUDE_ENGINE_ROLE"], os.environ["PRELUDE_ENGINE_DEVICE"] = sys.argv[1], "cpu"
os.environ["PRELUDE_ENGINE_REPORTS"] = sys.argv[2]
os.environ["PRELUDE_ENGINE_KV_PEERS"] = "10.9.9.9"

from observations import adapter_updates, tool_calls

from engine import cpu_support

cpu_support.install()


class Namespace(types.SimpleNamespace):
    """One that can be a key of a cache."""

    __hash__ = object.__hash__


def outcome(action):
    """An action's result, or the type and message of its exception."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 the point is to see it
        return f"{type(error).__name__}: {error}"


def observe() -> dict:
    """One observation per hook."""
    import nixl_cu13._api as nixl
    import torch
    import zmq
    from sglang.srt.constrained.base_grammar_backend import InvalidGrammarObject
    from sglang.srt.constrained.grammar_manager import GrammarManager
    from sglang.srt.disaggregation.common import conn as common
    from sglang.srt.disaggregation.nixl import conn
    from sglang.srt.entrypoints import http_server
    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.managers import tokenizer_control_mixin
    from sglang.srt.managers.detokenizer_manager import DetokenizerManager
    from sglang.srt.managers.io_struct import ConfigureLoggingReq
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling import sampling_batch_info
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    from engine.vital_signs import read_vitals

    def penalised_without_compiling() -> list[float]:
        scores = torch.tensor([[-1.0, 4.0]])
        with torch.compiler.set_stance("fail_on_recompile"):
            sampling_batch_info.apply_scaling_penalties(scores, torch.tensor([[2.0, 2.0]]))
        return scores.flatten().tolist()

    config = nixl.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0

    def num_kept():
        backend = GrammarManager(scheduler).grammar_backend
        for number in range(1000):
            backend.set_cache(("json", str(number)), InvalidGrammarObject("no"))
        is_kept = backend.get_cached_or_future_value(("json", "999"), False)[1]
        return [len(backend.cache), is_kept, backend.grammar_compiler.cache_limit_bytes]

    resident = types.SimpleNamespace(
        loras={"sha256:1": object()},
        create_lora_update_result=lambda success: types.SimpleNamespace(success=success),
    )
    scheduler = types.SimpleNamespace(
        server_args=None,
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))),
        model_config=types.SimpleNamespace(vocab_size=2, hf_eos_token_id={1}, think_end_ids=None),
        dp_tp_cpu_group=None,
        pp_group=None,
        dp_tp_group=types.SimpleNamespace(world_size=1, first_rank=0, is_first_rank=True),
    )

    def middlewares_of_bootstrap():
        app = types.SimpleNamespace(router=types.SimpleNamespace(), middlewares=[])
        app.router.add_route = app.router.add_post = app.router.add_get = lambda *_: None
        server = types.SimpleNamespace(app=app)
        for handler in ("route", "register_dp_rank", "query_dp_ranks", "health_check"):
            setattr(server, f"_handle_{handler}", None)
        common.CommonKVBootstrapServer._setup_routes(server)
        return len(app.middlewares)

    def zap_domain_of_kv_socket():
        context = zmq.Context()
        _, pull = common.get_zmq_socket_on_host(context, zmq.PULL, host="127.0.0.1")
        seen = [pull.getsockopt(zmq.ZAP_DOMAIN).decode().rstrip("\0"), zmq.ZAP_DOMAIN in context.sockopts]
        pull.close(0)
        context.term()
        return seen

    folder = Path(sys.argv[2])
    asked_detokenizer, kv_socket = [], zmq.Context.instance().socket(zmq.PULL)
    looping = types.SimpleNamespace(
        session_controller=types.SimpleNamespace(maybe_reap=lambda now: None),
        flush_wrapper=types.SimpleNamespace(check_pending=lambda: None),
        external_corpus_manager=None,
        scheduler_stage_metrics=None,
        ipc_channels=types.SimpleNamespace(
            send_to_detokenizer=types.SimpleNamespace(
                socket=object(), send_output=lambda question: asked_detokenizer.append(type(question).__name__)
            )
        ),
        disaggregation_mode=types.SimpleNamespace(value="prefill"),
        disagg_prefill_bootstrap_queue=types.SimpleNamespace(),
    )
    manager = Namespace(
        local_ip="127.0.0.1",
        rank_port=kv_socket.bind_to_random_port("tcp://127.0.0.1"),
        kv_args=types.SimpleNamespace(engine_rank=0),
        request_status={},
        _handle_deferred_abort_ack=lambda _notification: None,
    )
    looping.disagg_prefill_bootstrap_queue.kv_manager = manager

    def pass_of_the_loop():
        Scheduler.process_input_requests(looping, [])
        is_asked = bool(kv_socket.poll(1000 if asked_detokenizer else 0))
        messages = [part.decode() for part in kv_socket.recv_multipart()] if is_asked else []
        return [read_vitals(folder, "scheduler-0").num_signs, list(asked_detokenizer), messages]

    def detokenizer_signs():
        DetokenizerManager.handle_configure_logging_req(object(), ConfigureLoggingReq())
        return read_vitals(folder, "detokenizer").num_signs

    def kv_thread_signs():
        is_handled = conn.NixlKVManager._handle_abort_notification(manager, [b"ABORT", b"-1"])
        return [is_handled, read_vitals(folder, "kv-0").num_signs]

    def ids():
        return [tokenizer_control_mixin.LoRARef(lora_name="sha256:1", lora_path="/x").lora_id for _ in range(2)]

    def taken_by_the_kv_thread():
        """What it takes of a foreign message, a cut one, and one of SGLang's."""
        taken, done = [], threading.Event()
        messages = [[b"foreign"], [conn.GUARD, b"1"], [b"ABORT", b"1"]]

        def receive():
            if not messages:
                done.set()
                raise SystemExit
            return messages.pop(0)

        manager = types.SimpleNamespace(
            server_socket=types.SimpleNamespace(recv_multipart=receive),
            kv_args=types.SimpleNamespace(engine_rank=0),
            _handle_abort_notification=lambda message: message[0] == b"ABORT" and not taken.append("ABORT"),
        )
        conn.NixlKVManager._start_bootstrap_thread(manager)
        done.wait(1)
        return taken

    return {
        "revision_is_adapter_id": outcome(ids),
        "kv_thread_drops_bad_messages": outcome(taken_by_the_kv_thread),
        "loading_twice_is_harmless": outcome(
            lambda: LoRAManager.load_lora_adapter(resident, types.SimpleNamespace(lora_id="sha256:1")).success
        ),
        "scheduler_lives": outcome(pass_of_the_loop),
        "detokenizer_lives": outcome(detokenizer_signs),
        "kv_thread_lives": outcome(kv_thread_signs),
        "last_hidden_states_may_be_asked_for": [
            http_server.generate_contract_error({"text": "Hi", "return_hidden_states": mode}) is None
            for mode in ("last", True, "all")
        ],
        "kv_bootstrap_for_peers": outcome(middlewares_of_bootstrap),
        "kv_messages_from_peers": outcome(zap_domain_of_kv_socket),
        "kv_progress_thread_sleeps": config.pthrDelay,
        **adapter_updates.observed(),
        **tool_calls.observed(),
        "grammars_are_forgotten": outcome(num_kept),
        "repetition_penalty_is_not_compiled": outcome(penalised_without_compiling),
    }


def main() -> None:
    import torch.distributed as dist
    from sglang.srt.runtime_context import get_context, get_parallel

    get_context().override_server_args(device="cpu", grammar_backend="xgrammar", enable_lora=True).install()
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/ranks", rank=0, world_size=1)
    ranks = types.SimpleNamespace(cpu_group=dist.group.WORLD)
    with get_parallel().override(tp_rank=0, tp_size=1, tp_group=ranks, pp_rank=0, pp_size=1):
        report_observations()


def report_observations() -> None:
    before = observe()
    from engine.hooks.installation import source_sha256
    from engine.hooks.ledger import HOOKS

    digests = {hook.name: source_sha256(hook) for hook in HOOKS}
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from engine.hooks.report import report

    print(json.dumps({"before": before, "after": observe(), "digests": digests, "installed": report().hooks}))


main()
