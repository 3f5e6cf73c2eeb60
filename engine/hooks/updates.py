"""Bodies of the hooks into adapter loads: the id is the name, and loads and unloads are sent concurrently.

SGLang sends one load or unload to its scheduler, waits for the reply and then sends the next. The scheduler receives
messages once per batch, so each adapter waits one batch for every adapter before it. Here all are sent at once. The
scheduler handles them in order and replies in order, and requests follow the loads that they depend on.
"""

import asyncio
from collections import deque
from typing import Any


def name_is_id(lora_ref_type):
    """A constructor of adapter records whose id is their name. Adapters are named by their revision id.

    SGLang appends the id to the prefix-cache key, so requests share KV exactly if they use the same revision, even
    after the adapter was evicted and loaded again.
    """

    def make(*, lora_name: str, **fields):
        return lora_ref_type(lora_id=lora_name, lora_name=lora_name, **fields)

    return make


def update_side_by_side(original, manager):
    """Replace the manager's communicator by a Pipeline and its update lock by a no-op."""
    from sglang.srt.managers.io_struct import LoRAUpdateOutput
    from sglang.utils import TypeBasedDispatcher

    pipeline = Pipeline(manager._dispatch_to_scheduler)
    # The first handler of a type wins, so ours is added before SGLang's.
    manager._result_dispatcher += TypeBasedDispatcher([(LoRAUpdateOutput, pipeline.handle_recv)])
    original(manager)
    manager.update_lora_adapter_communicator = pipeline
    manager.lora_update_lock = NoLock()


class Pipeline:
    """Replaces SGLang's FanOutCommunicator. One scheduler replies: data parallelism is refused."""

    def __init__(self, send) -> None:
        self._send = send
        self._replies: deque[asyncio.Future[Any]] = deque()  # pending, in the order of sending

    async def __call__(self, update) -> list[Any]:
        """Send an update and return its reply."""
        reply = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        self._send(update)
        return [await reply]

    def handle_recv(self, reply) -> None:
        """Complete the oldest pending update, unless its caller was cancelled."""
        pending = self._replies.popleft()
        if not pending.done():
            pending.set_result(reply)

    def set_fan_out(self, _num_schedulers: int) -> None:
        """Do nothing: one scheduler replies."""


class NoLock:
    """Replaces the lock that SGLang takes around each update. SGLang asserts that it is held."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_error) -> None:
        return None

    def locked(self) -> bool:
        return True
