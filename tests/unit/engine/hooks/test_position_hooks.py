"""Decisions of the position hooks that a CPU engine cannot show."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.hooks import lora_kernels, positions, reft, report


def manager(in_graph: bool = False, **positions_of) -> SimpleNamespace:
    configs = {
        name: SimpleNamespace(hf_config={"prelude": {"positions": where}, "target_modules": ["q_proj"]})
        for name, where in positions_of.items()
    }
    begun: list[tuple] = []
    reft = SimpleNamespace(end_batch=begun.clear, begin_batch=lambda *words: begun.append(words), begun=begun)
    return SimpleNamespace(
        configs=configs,
        memory_pool=SimpleNamespace(prelude_reft=reft, uid_to_buffer_id={}),
        reset_lora_batch=lambda: "base path",
        loras={},
        can_use_prefill_cuda_graph=lambda _batch: in_graph,
    )


@pytest.mark.parametrize("has_experts", [False, True])
@pytest.mark.parametrize(
    ("is_adapted", "has_reft", "runs"), [(False, False, True), (True, False, True), (True, True, False)]
)
def test_graphs_are_for_batches_whose_kernels_they_have(
    has_experts: bool, is_adapted: bool, has_reft: bool, runs: bool
):
    """With room for experts there is one graph, which has none."""
    pool = SimpleNamespace(prelude_reft=SimpleNamespace(is_active=has_reft))
    lora_manager = SimpleNamespace(memory_pool=pool, prelude_batch_is_adapted=is_adapted)
    runner = SimpleNamespace(
        record_nolora_graph=not has_experts, model_runner=SimpleNamespace(lora_manager=lora_manager)
    )
    found = positions.no_graph_without_its_kernels(lambda *_: True, runner, object())
    assert found == (runs and not (has_experts and is_adapted))


@pytest.mark.parametrize(
    ("is_decode", "has_lora", "in_graph", "expected"),
    [
        (True, False, False, "base path"),
        (True, True, False, "kernels"),
        (False, False, False, "kernels"),
        (False, False, True, "kernels"),
    ],
)
def test_what_graphs_are_captured_with(monkeypatch, is_decode: bool, has_lora: bool, in_graph: bool, expected: str):
    """Captures and dry runs build their batches themselves, so there are no segments."""
    monkeypatch.setattr(positions, "_is_captured_with_lora", lambda: has_lora)
    own = manager(in_graph)
    mode = SimpleNamespace(is_decode=lambda: is_decode)
    batch = SimpleNamespace(forward_mode=mode, lora_ids=[None, None], extend_seq_lens_cpu=[5, 6])
    assert positions.prepare_segments(lambda *_: "kernels", own, batch) == expected
    assert own.memory_pool.prelude_reft.begun == ([(batch, None, [5, 6], True)] if in_graph else [])


@pytest.mark.parametrize(
    ("adapters", "in_graph", "expected"),
    [
        ((None,), False, "base path"),
        ((None,), True, "kernels"),  # a graph runs its kernels in any case: they must know that nothing is adapted
        (("a", None), False, "kernels"),
        (("r", None), False, "base path"),  # ReFT only: LoRA's kernels have nothing to do
        (("r", None), True, "kernels"),
    ],
)
def test_what_a_prefill_batch_is_prepared_with(monkeypatch, adapters, in_graph: bool, expected: str):
    own = manager(in_graph, a="prefill", r="prefill")
    own.configs["r"].hf_config["target_modules"] = []
    own.memory_pool.uid_to_buffer_id.update({"a": 3, "r": 2, None: 1})
    monkeypatch.setattr(positions, "_segments", tuple(positions.Segment(name, 4) for name in adapters))
    seen = []

    def original(_manager, batch):
        seen.append((batch.lora_ids, batch.extend_seq_lens_cpu, batch.batch_size))
        return "kernels"

    mode = SimpleNamespace(is_decode=lambda: False)
    assert positions.prepare_segments(original, own, SimpleNamespace(forward_mode=mode)) == expected
    assert seen == ([(list(adapters), [4] * len(adapters), len(adapters))] if expected == "kernels" else [])
    assert own.prelude_batch_is_adapted == any(adapters)
    begun = [(slots, lengths, graph) for _, slots, lengths, graph in own.memory_pool.prelude_reft.begun]
    slots = [own.memory_pool.uid_to_buffer_id[name] for name in adapters] if any(adapters) else None
    assert begun == ([(slots, [4] * len(adapters), in_graph)] if any(adapters) or in_graph else [])


def test_a_graph_never_runs_on_the_segments_of_another_batch(monkeypatch):
    """SGLang decides by requests whether a graph has room for a batch, and there are more segments."""
    own = manager(a="prefill")
    own.can_use_prefill_cuda_graph = lambda batch: batch.batch_size <= 2
    own.memory_pool.uid_to_buffer_id.update({"a": 3, None: 1})
    monkeypatch.setattr(positions, "_segments", tuple(positions.Segment(name, 4) for name in ("a", None, "a")))
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False), batch_size=2)
    with pytest.raises(RuntimeError, match="no room for a batch of 3 segments"):
        positions.prepare_segments(lambda *_: None, own, batch)


def test_graphs_have_room_for_as_many_segments_as_tokens():
    prepared, graphs = [], []
    pool = SimpleNamespace(prelude_reft=SimpleNamespace(allow_graphs=graphs.append))
    own = SimpleNamespace(memory_pool=pool)
    reft.allow_segments_in_graphs(
        lambda _manager, **given: prepared.append(given), own, max_num_tokens=512, max_num_requests=8
    )
    assert prepared == [{"max_num_tokens": 512}]
    assert graphs == [512]


def test_tokens_of_adapters_with_experts_are_known_by_their_slots(monkeypatch):
    own, seen = manager(a="prefill", e="prefill"), []
    own.loras.update({"a": SimpleNamespace(has_experts=False), "e": SimpleNamespace(has_experts=True)})
    own.memory_pool.uid_to_buffer_id.update({"a": 3, "e": 2, None: 1})
    own.memory_pool.prelude_experts = SimpleNamespace(
        begin_batch=lambda *words: seen.append(words), end_batch=lambda: seen.append("end")
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: False))
    for names in (("e", None, "a"), (None,)):
        monkeypatch.setattr(positions, "_segments", tuple(positions.Segment(name, 4) for name in names))
        positions.prepare_segments(lambda *_: None, own, batch)
    assert seen == ["end", ([2, -1, -1], [4, 4, 4]), "end"]


def test_experts_run_with_lora_only_where_a_batch_has_some():
    backend = SimpleNamespace(batch_info=None, prelude_experts=SimpleNamespace(slot_of=None))
    base = SimpleNamespace(forward=lambda *_words, **_options: "base")
    layer = SimpleNamespace(base_layer=base, lora_backend=backend)

    def run():
        states = SimpleNamespace(device=SimpleNamespace(type="cuda"))
        return lora_kernels.run_experts(lambda *_: "LoRA", layer, states, "routes")

    assert run() == "base"
    backend.batch_info = "of LoRA on attention"
    assert run() == "base"
    backend.prelude_experts.slot_of = "some tokens"
    assert run() == "LoRA"
    backend.batch_info = None
    with pytest.raises(RuntimeError, match="an adapter was not applied"):
        run()


def test_a_decode_batch_of_base_tokens_is_one_segment():
    own = manager(a="prefill", b="all")
    mode = SimpleNamespace(is_decode=lambda: True)
    reqs = [SimpleNamespace(lora_id=name, origin_input_ids=[0] * 5) for name in ("a", None, "a")]
    batch = SimpleNamespace(forward_mode=mode, reqs=reqs)
    assert positions._segments_of(own, batch) == (positions.Segment(None, 3),)
    reqs.append(SimpleNamespace(lora_id="b", origin_input_ids=[0] * 5))
    assert positions._segments_of(own, batch) == (positions.Segment(None, 3), positions.Segment("b", 1))


def test_a_request_is_marked_when_its_prompt_is_read():
    """It may be retracted before it decodes: what it then reads of its answer is no prefix either."""
    own = manager(a="prefill", b="all")
    mode = SimpleNamespace(is_decode=lambda: False, is_extend=lambda: True)
    reqs = [SimpleNamespace(lora_id=name, origin_input_ids=[0] * 5) for name in ("a", "b", None)]
    batch = SimpleNamespace(forward_mode=mode, reqs=reqs, prefix_lens=[0, 0, 0], extend_lens=[6, 6, 6])
    expected = ("a", 5), (None, 1), ("b", 6), (None, 6)
    assert positions._segments_of(own, batch) == tuple(positions.Segment(*each) for each in expected)
    assert [req.lora_id for req in reqs] == ["a", "b", None]  # slots are filled for these
    kept = [positions.keep_only_the_prompts_kv(lambda *_, up_to: up_to, object(), req, up_to=6) for req in reqs]
    assert kept == [5, 6, 6]


@pytest.mark.parametrize(("adapter", "kv_tokens", "kept"), [("a", 7, 7), ("a", 11, 10), (None, 30, 30)])
def test_only_the_prompts_kv_is_kept(adapter: str | None, kv_tokens: int, kept: int):
    req = SimpleNamespace(prelude_adapter=adapter, lora_id=None, origin_input_ids=[0] * 10)
    assert positions.keep_only_the_prompts_kv(lambda *_, up_to: up_to, object(), req, up_to=kv_tokens) == kept


def test_decoding_requests_free_their_slots_before_a_prefill_batch_is_built():
    own = manager(a="prefill", b="all")
    own.loras = {"a": "its mapping"}
    running = SimpleNamespace(reqs=[SimpleNamespace(lora_id=name) for name in ("a", None, "b")])
    retracted = SimpleNamespace(lora_id=None, prelude_adapter="a", is_retracted=True)
    new = SimpleNamespace(lora_id=None, is_retracted=False)
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[]),
        waiting_queue=[retracted, new],
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=own)),
    )
    seen = []

    def build(_scheduler, running_batch):
        seen.extend(req.lora_id for req in running_batch.reqs)

    positions.free_slots_of_decoding(build, scheduler, running_batch=running)
    assert seen == [None, None, "b"]  # an adapter for all positions needs its slot in decode
    assert (retracted.lora_id, new.lora_id) == ("a", None)


def test_a_retracted_request_whose_adapter_has_gone_is_reported_until_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(report.REPORT_DIR_VARIABLE, str(tmp_path))
    monkeypatch.setattr(report, "_lacking", {})
    own = manager()
    own.loras = {"b": "its mapping"}
    retracted = [
        SimpleNamespace(rid=f"of {name}", lora_id=None, prelude_adapter=name, is_retracted=True)
        for name in ("a", "b", None)
    ]
    scheduler = SimpleNamespace(
        running_batch=SimpleNamespace(reqs=[]),
        waiting_queue=[*retracted, SimpleNamespace(lora_id="c", is_retracted=False)],
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(lora_manager=own)),
    )

    def lacking() -> dict[str, str]:
        positions.free_slots_of_decoding(lambda _scheduler: None, scheduler)
        return report.read_lacking(tmp_path)

    assert report.read_lacking(tmp_path) == {}
    assert lacking() == {"of a": "a"}
    assert report.read_reports(tmp_path) == []  # it is no report of a process
    (tmp_path / "lacking-adapters").unlink()
    assert lacking() == {}  # written when it changes
    own.loras["a"] = "its mapping"
    lacking()
    assert (tmp_path / "lacking-adapters").read_text() == "{}"


def test_the_base_model_is_counted_among_a_batchs_slots():
    counted = []
    own = SimpleNamespace(loras={"a": "its mapping", "b": "its mapping"})

    def validate(_manager, ids) -> bool:
        counted.append(ids)
        return True

    assert positions.count_the_base_models_slot(validate, own, {"a", None, "b"})
    assert counted == [{"a", "b", None}]
    assert not positions.count_the_base_models_slot(validate, own, {"a", "gone"})  # it waits until it is loaded


def test_slots_are_filled_for_segments_only(monkeypatch):
    fetched = []

    def fetch(_manager, new, _running):
        fetched.append(new)

    for segments in ((positions.Segment(None, 3),), (positions.Segment("a", 2), positions.Segment(None, 1))):
        monkeypatch.setattr(positions, "_segments", segments)
        positions.fetch_only_adapters_in_use(fetch, SimpleNamespace(memory_pool=None), {"a", "b", None})
    assert fetched == [{"a", None}]  # nothing for the batch of base tokens


@pytest.mark.parametrize(
    ("adapter", "longest", "expected"),
    [("a", 30, 10), ("a", 4, 4), (None, 30, 30)],
)
def test_a_retracted_request_matches_no_more_than_its_prompt(adapter, longest, expected):
    req = SimpleNamespace(prelude_adapter=adapter, origin_input_ids=[0] * 10)
    assert positions.match_the_prompt_only(lambda _req, _length: longest, req, 40) == expected
