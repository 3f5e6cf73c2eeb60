"""Engines' queue lengths, attributed to the pool that causes the wait: prefill or decode.

A prompt is not read before its decode worker has reserved memory for its KV. So prompts queued at a prefill engine may
in fact wait for decode; the engine reports how many do. Conversely, memory at a decode worker may be reserved for
sequences whose prompts still wait at prefill workers; sequences that wait for such memory in fact wait for prefill.
"""

from collections.abc import Iterable
from typing import Self

import msgspec

from cluster.control import control_pb2 as control


class Queues(msgspec.Struct, frozen=True):
    """Numbers of requests at one engine, from all routers."""

    requests: int = 0  # all that it has
    awaiting_memory: int = 0  # prefill: prompts whose decode worker has no free memory; decode: sequences without
    awaiting_kv: int = 0  # prefill: read, KV being sent; decode: with memory, their KV is not here
    max_running: int = 0  # that it takes at a time; 0: nothing is reported
    active_kv_tokens: int = 0  # KV in use, without what is kept for KV that is not here
    queued: int = 0  # of `requests`, those that the engine does not work on

    @classmethod
    def of(cls, load: control.Load) -> Self:
        return cls(
            load.running_requests + load.queued_requests,
            load.awaiting_room_requests,
            load.awaiting_kv_requests,
            load.max_running_requests,
            load.active_kv_tokens,
            load.queued_requests,
        )

    def num_unread(self, role: str) -> int:
        """Prompts that the engine has and has not read; of a unified one, without those that it reads now."""
        return self.queued if role == "unified" else max(0, self.requests - self.awaiting_kv)

    # ---- of a prefill engine ----

    @property
    def blocked_share(self) -> float:
        """The share of unread prompts that wait for memory at a decode worker."""
        num_unread = self.requests - self.awaiting_kv
        return min(1.0, self.awaiting_memory / num_unread) if num_unread > 0 else 0.0

    # ---- of a decode engine ----

    @property
    def generating(self) -> int:
        """Sequences that generate, or could in the next step."""
        return max(0, self.requests - self.awaiting_memory - self.awaiting_kv)

    @property
    def waiting_for_decode(self) -> float:
        """How many sequences without memory wait for decode: the share that generate, of those that have memory."""
        num_inside = self.generating + self.awaiting_kv
        return self.awaiting_memory * (self.generating / num_inside if num_inside else 1.0)

    def load_ratio(self, max_kv_tokens: int) -> float:
        """The share of the engine's capacity that generating sequences use. Above 1 if others wait for memory."""
        kv_share = self.active_kv_tokens / max_kv_tokens if max_kv_tokens else 0.0
        share = max(kv_share, self.generating / self.max_running if self.max_running else 0.0)
        num_inside = self.generating + self.awaiting_kv
        if not (self.awaiting_memory and num_inside):
            return share
        # All memory is taken, though less may be in use: engines reserve KV for tokens to come.
        return max(share, self.generating / num_inside) * (1 + self.awaiting_memory / num_inside)


NO_QUEUES = Queues()


def decode_share(decodes: Iterable[Queues]) -> float:
    """The share of the sequences without memory at decode workers that wait for decode; 1 if there are none."""
    found = [(each.waiting_for_decode, each.awaiting_memory) for each in decodes if each.awaiting_memory]
    return sum(own for own, _ in found) / sum(every for _, every in found) if found else 1.0
