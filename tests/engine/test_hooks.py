"""Every hook's target still has the source in the ledger, and every hook takes effect."""

from pathlib import Path

import pytest
from support.engines.fork_server import SGLANG

from engine.hooks.ledger import HOOKS, hooks_for
from engine.hooks.requests.grammars import MAX_BYTES, MAX_GRAMMARS

HERE = Path(__file__).parent
_CUT_CALL = ["I look.", ["find", '{"city": "R']]
_CALLS = [
    "I look.",
    ["find", '{"city": "Rome \\n\\"é", "days": [1, {"at": -2.5, "wet": true}]}'],
    ["find", '{"city": "Oslo"}'],
]

# Checks of what each target does without our hook, and with it.
EXPECTED = {
    "revision_is_adapter_id": (lambda ids: ids[0] != ids[1], lambda ids: ids == ["sha256:1", "sha256:1"]),
    "loading_twice_is_harmless": (lambda seen: "Error" in str(seen), lambda seen: seen is True),
    "scheduler_lives": (
        lambda seen: seen == [0, [], []],
        lambda seen: seen == [1, ["ConfigureLoggingReq"], ["ABORT", "-1"]],
    ),
    "detokenizer_lives": (lambda seen: seen == 0, lambda seen: seen == 1),
    "kv_thread_lives": (lambda seen: seen == [True, 0], lambda seen: seen == [True, 1]),
    "last_hidden_states_may_be_asked_for": (
        lambda seen: seen == [False, True, False],
        lambda seen: seen == [True, True, False],
    ),
    "kv_bootstrap_for_peers": (lambda seen: seen == 0, lambda seen: seen == 1),
    "kv_messages_from_peers": (lambda seen: seen == ["", False], lambda seen: seen == ["prelude-kv", False]),
    "kv_thread_drops_bad_messages": (lambda seen: seen == [], lambda seen: seen == ["ABORT"]),
    "kv_progress_thread_sleeps": (lambda seen: seen == 0, lambda seen: seen > 0),
    "grammars_are_forgotten": (
        lambda seen: seen == [1000, True, -1],
        lambda seen: seen == [MAX_GRAMMARS, True, MAX_BYTES],
    ),
    "repetition_penalty_is_not_compiled": (lambda seen: "recompile" in seen, lambda seen: seen == [-2.0, 2.0]),
    "cut_calls_stay_open": (
        lambda seen: seen[0][1] == ["find", '{"city": "R"}'] and seen[2] == ["1 "],
        lambda seen: seen == [_CUT_CALL, _CALLS, ["1 <"], _CALLS, _CUT_CALL],
    ),
    # An unload between two replies, and whether the registry and the scheduler have the adapter then; one after them.
    "loads_are_noted": (
        lambda seen: seen[:2] == ["True", [True, False]],
        lambda seen: "in use by a load" in seen[0] and seen[1:] == [[True, True], "True", [False, False]],
    ),
}


# Hooks whose effect other tests show, and the test that fails without each.
SHOWN_ELSEWHERE = {
    "scheduler_reports_itself": "test_unified.py: an engine without its report is not up",
    "prefill_is_published": "test_unified.py::test_a_prompt_is_counted_while_it_is_computed",
    "keys_of_the_environment": "test_access.py::test_each_key_opens_what_it_is_for",
    "mutual_tls": "test_access.py::test_clients_without_a_certificate_of_the_cluster_get_nothing",
    "lora_layers_do_not_pin": "test_unified.py: no CPU engine with adapters starts without it",
    "pin_memory_is_identity": "test_unified.py: no CPU engine with adapters starts without it",
    "kv_is_host_memory": "tests/cluster/answers/test_parity.py: no KV moves on CPUs without it",
    "kv_is_cut_in_host_memory": "tests/cluster/answers/test_tensor_parallel.py",
    "experts_without_lora_run_in_their_base_layer": "test_experts.py: SGLang's kernels need a GPU",
    "experts_are_adapted": "test_experts.py::test_parity",
    "prompts_are_digested": "tests/cluster/faults/test_late_kv_writes.py::test_kv_of_another_prompt",
    "digests_are_compared": "tests/cluster/faults/test_late_kv_writes.py::test_kv_of_another_prompt",
    "freed_kv_waits_for_the_running_step": "tests/unit/engine/hooks/kv/test_kv_held_rooms.py",
    "unlike_prefill_engines_are_declined": "tests/unit/engine/hooks/kv/test_kv_held_rooms.py",
    "lengths_are_those_that_fit": "tests/cluster/answers/test_pair_bfloat16.py; test_unified_worker.py",
    "busy_engines_stream_fewer_events": "test_unified.py::test_busy_engines_stream_fewer_events",
    "batches_are_cut_by_position": "test_unified.py: every parity test",
    "slots_for_segments_only": "tests/unit/engine/hooks/test_position_hooks.py",
    "lora_runs_on_segments": "test_unified.py::test_parity_alone",
    "base_tokens_have_a_slot": "tests/unit/engine/hooks/test_position_hooks.py",
    "decoding_holds_no_slot": "hooks/test_position_hooks.py; test_unified_worker.py::test_retracted_requests",
    "answers_are_no_prefix": "test_unified.py::test_follow_up_turn; test_unified_worker.py::test_retracted_requests",
    "retracted_answers_match_no_prompt": "tests/unit/engine/hooks/test_position_hooks.py",
    "adapted_decode_runs_without_graph": "tests/unit/engine/hooks/test_position_hooks.py",
    "prefill_returns_hidden_states": "tests/cluster/answers/test_parity.py::test_embeddings",
    "adapters_are_packed": "test_unified.py::test_parity_alone",
    "unloading_is_quick": "test_unified.py::test_an_adapter_leaves_once_its_prompt_is_read",
    "idle_adapters_are_unloaded": "tests/unit/engine/hooks/test_use_hooks.py",
    "adapters_load_side_by_side": "tests/unit/engine/hooks/test_update_hooks.py; test_unified.py: every load",
    "uses_are_noted": "test_unified.py::test_an_adapter_that_left_comes_back",
    "memory_pool_is_complemented": "test_unified.py::test_parity_alone",
    "segments_in_prefill_graphs": "tests/unit/engine/hooks/test_position_hooks.py; test_bfloat16.py on a GPU",
    "slots_of_experts_have_their_own_rank": "test_experts.py; tests/unit/engine/hooks/test_packed_hooks.py",
    "slots_are_filled_at_once": "test_unified.py::test_more_adapters_than_slots_at_once",
    "slots_are_cleared_at_once": "tests/unit/engine/hooks/test_packed_hooks.py; test_unified.py: every unload",
    "kv_messages_are_sent_again": "tests/unit/engine/hooks/kv/test_kv_connections.py",
    "failed_kv_rooms_are_held": "tests/unit/engine/hooks/kv/test_kv_held_rooms.py; test_late_kv_writes.py",
    "kv_transfers_end_beside_retracted": "test_late_kv_writes.py; tests/unit/engine/hooks/kv/test_kv_held_rooms.py",
    "broken_kv_connections_are_made_again": "tests/unit/engine/hooks/kv/test_kv_connections.py; test_two_hosts.py",
    "failed_transfers_keep_their_source": "tests/unit/engine/hooks/kv/test_kv_held_rooms.py",
    "decode_reserves_what_can_come": "tests/unit/engine/hooks/kv/test_kv_room.py",
    "prefill_is_counted": "test_unified.py::test_a_prompt_is_counted_while_it_is_computed",
    "children_are_forked": "test_unified.py::test_its_processes_are_forked",
    "lm_head_gets_no_lora_batch": "tests/unit/engine/hooks/test_lora_batch_hook.py on a GPU",
    "lora_shrinks_on_all_multiprocessors": "kernels/test_kernels.py; test_bfloat16.py",
    "lora_expands_with_wide_accesses": "kernels/test_kernels.py; test_bfloat16.py on a GPU",
}


@pytest.fixture(scope="module")
def observed(tmp_path_factory) -> dict:
    return SGLANG.printed_by(HERE / "hooks_in_action.py", "prefill", str(tmp_path_factory.mktemp("reports")))


def test_the_pin_still_matches(observed: dict):
    assert observed["digests"] == {hook.name: hook.source_sha256 for hook in HOOKS}


def test_all_hooks_of_the_role_are_installed(observed: dict):
    assert observed["installed"] == [hook.name for hook in hooks_for("prefill", "cpu")]


def test_every_hook_is_shown_to_act():
    assert {hook.name for hook in HOOKS} == EXPECTED.keys() | SHOWN_ELSEWHERE.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_hook_acts(observed: dict, name: str):
    without, with_hook = EXPECTED[name]
    assert without(observed["before"][name]), f"without the hook: {observed['before'][name]}"
    assert with_hook(observed["after"][name]), f"with the hook: {observed['after'][name]}"


def test_the_table_in_the_docs_is_the_ledger():
    from engine.hooks.table import table

    page = Path(__file__).parents[2] / "docs" / "sglang-hooks.md"
    assert page.read_text() == table(), "run: python -m engine.hooks.table > docs/sglang-hooks.md"


DAMAGES = {
    "source": "the ledger was written for",
    "target": "has no no_such_method",
    "module": "cannot be found",
    "version": "are verified for",
    "untaken": "did not take it",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_mismatch_ends_the_process(damage: str, tmp_path: Path):
    done = SGLANG.run(HERE / "damaged_ledger.py", "prefill", str(tmp_path), damage)
    assert done.returncode == 1, done.stderr[-1000:]
    assert "Traceback" not in done.stderr, done.stderr[-1000:]  # an exception would not end an engine
    assert DAMAGES[damage] in done.stderr


def test_an_engine_without_the_plugin_does_not_start(tmp_path: Path):
    """SGLang silently skips plugins that SGLANG_PLUGINS does not name."""
    done = SGLANG.run(
        "import sys; from engine.launch import main; main(sys.argv[1:])",
        "--model-path",
        str(tmp_path),
        SGLANG_PLUGINS="somebody-else",
        PRELUDE_ENGINE_ROLE="decode",
        PRELUDE_ENGINE_DEVICE="cpu",
        PRELUDE_ENGINE_REPORTS=str(tmp_path),
    )
    assert done.returncode == 1
    assert "the prelude plugin did not run" in done.stderr
