"""Agent of a decode worker. Its prefill peers warm it up."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator

from cluster.agent.peers import Peer
from cluster.agent.worker_agent import WorkerAgent


class DecodeAgent(WorkerAgent):
    """Agent of a worker that receives KV cache and decodes."""

    role = "decode"
    peer_role = "prefill"

    def is_warm_with(self, peer: Peer) -> bool:
        own, state = (self.name, self.incarnation), peer.state
        return (
            bool(peer.incarnation)
            and state is not None
            and own in ((pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs)
        )

    @contextlib.asynccontextmanager
    async def resources(self) -> AsyncIterator[None]:
        if self.config.role_changes:  # it may have been a prefill worker: no adapter is left here
            await asyncio.to_thread(shutil.rmtree, self.adapters_folder, ignore_errors=True)
        yield

    async def run_role(self) -> None:
        await asyncio.Event().wait()
