"""Unloading packed adapters, with the calls that SGLang's manager makes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.hooks import packed


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
    assert packed.unload(None, manager, lora_ref).success is success
    assert manager.given_back == (["a's mapping"] if success else [])
    assert packed.unload(None, manager, lora_ref).success is success  # again
    assert manager.given_back == (["a's mapping"] if success else [])


class Pool:
    """The parts of SGLang's memory pool that the hook uses."""

    def __init__(self, *, has_loader: bool, has_embeddings: bool) -> None:
        self.cleared: list[tuple[str, int]] = []
        if has_loader:
            filler = SimpleNamespace(clear=lambda slot: self.cleared.append(("at once", slot)))
            self.prelude_packed = SimpleNamespace(filler=filler)
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
