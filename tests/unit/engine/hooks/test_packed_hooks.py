"""Loading, filling and unloading packed adapters, with the calls that SGLang's manager and pool make."""

import multiprocessing
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.hooks import memory_pool, packed
from engine.hooks.memory_pool import EXPERT_RANK_VARIABLE


class Manager:
    """The parts of SGLang's LoRAManager that the hook uses."""

    def __init__(self, success: bool) -> None:
        self.loras = {"sha256:a": "a's mapping"}
        self.given_back: list[str] = []
        self.memory_pool = SimpleNamespace(prelude_packed=SimpleNamespace(unload=self.given_back.append))
        self._success = success

    def create_lora_update_result(self, success: bool):
        return SimpleNamespace(success=success)

    def _unload_lora_adapter(self, lora_ref):
        if self._success:
            del self.loras[lora_ref.lora_id]
        return self.create_lora_update_result(self._success)


@pytest.mark.parametrize("success", [True, False])
def test_memory_is_given_back_once_the_adapter_is_gone(success: bool):
    """A failed unload keeps the memory locked: slots are still filled from it."""
    manager, lora_ref = Manager(success), SimpleNamespace(lora_id="sha256:a")
    assert packed.unload(manager, lora_ref).success is success
    assert manager.given_back == (["a's mapping"] if success else [])
    assert packed.unload(manager, lora_ref).success is success  # again
    assert manager.given_back == (["a's mapping"] if success else [])


def load_on_ranks(folder: Path, *successes: tuple[bool, ...]) -> list[list[tuple[object, ...]]]:
    """What `load_twice` returns on each rank, a process of its own, for each of its successes."""
    spawned = multiprocessing.get_context("spawn")
    answers = spawned.Queue()
    ranks = [
        spawned.Process(target=_rank, args=(folder, rank, len(successes), own, answers), daemon=True)
        for rank, own in enumerate(successes)
    ]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(120)
    return [found[rank] for rank in range(len(ranks))]


def _rank(folder: Path, rank: int, count: int, succeed: tuple[bool, ...], answers: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder / 'ranks'}", rank=rank, world_size=count)
    answers.put((rank, [load_twice(each) for each in succeed]))
    dist.barrier()


def load_twice(succeeds: bool) -> tuple[object, ...]:
    """Load `sha256:b` twice on this rank: each answer, what is loaded then, and what was given back."""
    import torch.distributed as dist

    manager = LoadingManager(succeeds)
    packed._ranks = lambda: dist.group.WORLD
    lora_ref = SimpleNamespace(lora_id="sha256:b")
    answers = [packed.load_once(None, manager, lora_ref) for _ in range(2)]
    outcomes = [(each.success, each.error_message) for each in answers]
    return outcomes, sorted(manager.loras), sorted(manager.configs), manager.given_back


class LoadingManager(Manager):
    """One rank's, which can load the file or not."""

    tp_size = 2

    def __init__(self, succeeds: bool) -> None:
        super().__init__(True)
        self.configs: dict[str, str] = {}
        self._succeeds = succeeds

    def create_lora_update_result(self, success: bool, error_message: str = ""):
        return SimpleNamespace(success=success, error_message=error_message)

    def _load_lora_adapter(self, lora_ref):
        self.configs[lora_ref.lora_id] = "its configuration"
        if not self._succeeds:
            return self.create_lora_update_result(False, "no memory")
        self.loras[lora_ref.lora_id] = "b's mapping"
        return self.create_lora_update_result(True)

    def _unload_lora_adapter(self, lora_ref):
        del self.configs[lora_ref.lora_id]
        return super()._unload_lora_adapter(lora_ref)


ELSEWHERE = (False, "another tensor-parallel rank of the engine cannot load it; its log says why")


@pytest.mark.slow
def test_tensor_parallel_ranks_load_an_adapter_all_or_none(tmp_path: Path):
    first, second = load_on_ranks(tmp_path, (True, True), (True, False))
    assert first[0] == second[0] == ([(True, "")] * 2, ["sha256:a", "sha256:b"], ["sha256:b"], [])
    assert first[1] == ([ELSEWHERE] * 2, ["sha256:a"], [], ["b's mapping"] * 2)
    assert second[1] == ([(False, "no memory")] * 2, ["sha256:a"], [], [])


class Fills:
    """Notes what is written where, and which batch waits."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def begin_batch(self) -> None:
        self.seen.append("begin")

    @contextmanager
    def writing(self, slot: int):
        self.seen.append(("writing", slot))
        yield
        self.seen.append(("written", slot))

    def end_fills(self, slots) -> None:
        self.seen.append(("end", set(slots)))


class Pool:
    """The parts of SGLang's memory pool that the hook uses."""

    def __init__(self, *, has_loader: bool, has_embeddings: bool) -> None:
        self.cleared: list[tuple[str, int]] = []
        if has_loader:
            filler = SimpleNamespace(clear=lambda slot: self.cleared.append(("at once", slot)))
            self.prelude_packed = SimpleNamespace(filler=filler, stream=Fills())
        self.embedding_A_buffer = {"embed_tokens": object()} if has_embeddings else {}
        self.embedding_B_buffer = self.lm_head_A_buffer = self.lm_head_B_buffer = self.new_embeddings_buffer = {}


@pytest.mark.parametrize(
    ("has_loader", "has_embeddings", "how"),
    [(True, False, "at once"), (False, False, "by SGLang"), (True, True, "by SGLang")],
)
def test_a_slot_is_cleared_at_once_where_that_clears_all_of_it(has_loader: bool, has_embeddings: bool, how: str):
    """SGLang constructs its pool before there is a loader; buffers of embeddings are none of the loader's."""
    pool = Pool(has_loader=has_loader, has_embeddings=has_embeddings)
    packed.clear_slot(lambda _, slot: pool.cleared.append(("by SGLang", slot)), pool, 3)
    assert pool.cleared == [(how, 3)]
    if has_loader:
        assert pool.prelude_packed.stream.seen == [("writing", 3), ("written", 3)]


def test_the_base_models_slot_is_written_on_the_same_stream():
    fills, seen = Fills(), []
    reft = SimpleNamespace(fill=lambda *args: seen.append(("reft", *args, *fills.seen)))
    pool = SimpleNamespace(prelude_packed=SimpleNamespace(stream=fills), prelude_reft=reft)
    packed.fill_slot(lambda _pool, *args: seen.append((*args, *fills.seen)), pool, None, 2, None)
    assert seen == [(None, 2, None, ("writing", 2)), ("reft", 2, None, ("writing", 2))]


def test_a_batch_waits_for_the_fills_of_its_slots():
    fills = Fills()
    pool = SimpleNamespace(prelude_packed=SimpleNamespace(stream=fills), uid_to_buffer_id={})
    with packed.fills_of_a_batch(pool, {"a", None}):
        pool.uid_to_buffer_id |= {"a": 4, None: 1, "b": 2}
        fills.seen.append("SGLang fills")
    assert fills.seen == ["begin", "SGLang fills", ("end", {4, 1})]


def test_sglang_fills_slots_while_it_constructs_its_pool():
    seen = []
    pool = SimpleNamespace()
    with packed.fills_of_a_batch(pool, {None}):
        packed.fill_slot(lambda _pool, *args: seen.append(args), pool, None, 0, None)
    assert seen == [(None, 0, None)]


@pytest.mark.parametrize(("module", "rank"), [("gate_up_proj_moe", 3), ("down_proj_moe", 3), ("qkv_proj", 64)])
def test_experts_have_a_rank_of_their_own(monkeypatch, module: str, rank: int):
    monkeypatch.setenv(EXPERT_RANK_VARIABLE, "3")

    def shape(_module, _model, max_rank, layer):
        return max_rank, layer

    pool = SimpleNamespace(is_moe_module=lambda name: "moe" in name, get_lora_A_shape=shape, get_lora_B_shape=shape)
    made = []

    def original(_pool, model):
        made.extend(getattr(pool, f"get_lora_{factor}_shape")(module, model, 64, 2) for factor in "AB")

    memory_pool.room_for_experts(original, pool, None)
    assert made == [(rank, 2)] * 2
