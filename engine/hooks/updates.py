"""Body of the hook by which adapters are loaded and unloaded side by side.

SGLang sends one load or unload to its scheduler, waits for the reply and then sends the next; the scheduler looks at
its mail once per batch. So each adapter would wait a batch for each one before it. Here all are sent at once. The
scheduler takes them in order and replies in order, and requests come after the loads that they rely on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


def update_side_by_side(original, manager, server_args):
    """Give the manager our way to its scheduler, and nothing to wait for before it."""
    from sglang.srt.managers.io_struct import LoRAUpdateOutput
    from sglang.utils import TypeBasedDispatcher

    pipeline = Pipeline(manager._dispatch_to_scheduler)
    manager._result_dispatcher += TypeBasedDispatcher(
        [(LoRAUpdateOutput, pipeline.handle_recv)]
    )  # the first one counts
    original(manager, server_args)
    manager.update_lora_adapter_communicator = pipeline
    manager.lora_update_lock = NoLock()


class Pipeline:
    """Stands for SGLang's FanOutCommunicator, with one scheduler that replies: other data parallelism is refused."""

    def __init__(self, send) -> None:
        self._send = send
        self._replies: deque[asyncio.Future[Any]] = deque()  # waited for, in the order of what was sent

    async def __call__(self, update) -> list[Any]:
        """Send an update; its reply."""
        reply = asyncio.get_running_loop().create_future()
        self._replies.append(reply)
        self._send(update)
        return [await reply]

    def handle_recv(self, reply) -> None:
        """A reply has come, perhaps for somebody who has stopped waiting."""
        waiting = self._replies.popleft()
        if not waiting.done():
            waiting.set_result(reply)

    def set_fan_out(self, _num_schedulers: int) -> None:
        """SGLang says how many schedulers reply: one."""


class NoLock:
    """Stands for the lock that SGLang takes around each update, and is always held as far as SGLang asks."""

    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_error) -> None:
        return None

    def locked(self) -> bool:
        return True
