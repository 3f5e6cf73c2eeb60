"""Agent of a decode worker. Its prefill peers warm it up."""

from __future__ import annotations

import asyncio

from cluster.agent.worker_agent import WorkerAgent
from cluster.control import control_pb2 as pb


class DecodeAgent(WorkerAgent):
    """Agent of a worker that receives KV cache and decodes."""

    role = "decode"
    peer_role = "prefill"

    def why_not_warm(self) -> str:
        up = {
            name: peer.state
            for name, peer in self.peers.items()
            if peer.state is not None and peer.state.engine_state == pb.ENGINE_STATE_UP
        }
        warm = {name for name, state in up.items() if self._is_warmed_by(state)}
        missing = sorted(up.keys() - warm) or ([] if warm else ["any prefill worker"])
        return f"not warm yet with {', '.join(missing)}" if missing else ""

    def _is_warmed_by(self, prefill: pb.WorkerState) -> bool:
        return any(
            pair.decode_name == self.name and pair.decode_incarnation == self.incarnation for pair in prefill.warm_pairs
        )

    async def run_role(self) -> None:
        await asyncio.Event().wait()
