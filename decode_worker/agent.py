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
        if any(self._is_warmed_by(state) for state in self._peers_up().values()):
            return ""
        return f"not warm yet with {', '.join(self.not_warm_with()) or 'any prefill worker'}"

    def not_warm_with(self) -> list[str]:
        return sorted(name for name, state in self._peers_up().items() if not self._is_warmed_by(state))

    def _peers_up(self) -> dict[str, pb.WorkerState]:
        states = {name: peer.state for name, peer in self.peers.items()}
        return {
            name: state
            for name, state in states.items()
            if state is not None and state.engine_state == pb.ENGINE_STATE_UP and not state.hung
        }

    def _is_warmed_by(self, prefill: pb.WorkerState) -> bool:
        return any(
            pair.decode_name == self.name and pair.decode_incarnation == self.incarnation for pair in prefill.warm_pairs
        )

    async def run_role(self) -> None:
        await asyncio.Event().wait()
