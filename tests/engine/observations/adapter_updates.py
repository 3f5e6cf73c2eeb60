"""SGLang's own code between a late load and an unload of one adapter, for `hooks_in_action.py`."""

import asyncio
from unittest.mock import patch

from engine.hooks.updates import name_is_id

NAME = "sha256:1"


def observed() -> dict[str, object]:
    """After two loads and an unload between their replies, then one more: what said so, and who has the adapter."""
    from sglang.srt.lora.lora_registry import LoRARef
    from sglang.srt.managers import tokenizer_control_mixin

    # As `revision_is_adapter_id` does, so that this shows what the hook adds to the others.
    with patch.object(tokenizer_control_mixin, "LoRARef", name_is_id(LoRARef)):
        return {"loads_are_noted": asyncio.run(_between_two_replies())}


async def _between_two_replies() -> list[object]:
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.lora.lora_registry import LoRARegistry
    from sglang.srt.managers import tokenizer_control_mixin
    from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput, LoRAUpdateOutput, UnloadLoRAAdapterReqInput

    from engine.hooks.updates import NoLock, Pipeline

    in_scheduler: set[str] = set()  # a revision is loaded once, however often it is asked for
    sent: list[object] = []

    def reply() -> None:
        update = sent.pop(0)
        if isinstance(update, LoadLoRAAdapterReqInput):
            in_scheduler.add(update.lora_id)
        else:
            in_scheduler.discard(update.lora_id)
        pipeline.handle_recv(LoRAUpdateOutput(success=True, loaded_adapters={}))

    pipeline = Pipeline(sent.append)
    manager = tokenizer_control_mixin.TokenizerControlMixin()
    manager.auto_create_handle_loop = lambda: None
    manager.lora_registry, manager.lora_ref_cache, manager.pending_lora_unloads = LoRARegistry(), {}, {}
    manager.lora_update_lock, manager.update_lora_adapter_communicator = NoLock(), pipeline
    manager.rid_to_state, manager.disaggregation_mode = {}, DisaggregationMode.PREFILL

    async def unload() -> str:
        try:
            return str((await manager._unload_lora_adapter_locked(UnloadLoRAAdapterReqInput(lora_name=NAME))).success)
        except ValueError as error:
            return str(error)

    def who_has_it() -> list[bool]:
        """The registry, by which requests are admitted, and the scheduler, which they would end."""
        return [NAME in manager.lora_registry.get_all_adapters(), bool(in_scheduler)]

    async def settled() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    loads = [
        asyncio.create_task(manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=NAME, lora_path="/x")))
        for _ in range(2)
    ]
    await settled()
    reply()
    await settled()
    early = asyncio.create_task(unload())
    await settled()
    while sent:
        reply()
    await asyncio.gather(*loads)
    seen: list[object] = [await early, who_has_it()]
    late = asyncio.create_task(unload())
    await settled()
    while sent:
        reply()
    return [*seen, await late, who_has_it()]
