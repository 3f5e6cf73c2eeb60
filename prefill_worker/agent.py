"""Agent of a prefill worker: holds adapters and warms up pairs with decode workers."""

import asyncio
import logging
from pathlib import Path

from adapters.model.base_weights import are_known_to_differ
from cluster.agent.kv_transfer import cuts_between
from cluster.agent.peers import Peer
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from engine.errors import EngineError
from prefill_worker.adapter_holder import AdapterHolder
from prefill_worker.warm_up import FIRST_TRY_S, TRY_S, to_nobody, warm_engine, warm_pair

log = logging.getLogger(__name__)

_RETRY_S = 3.0  # by then the decode engine knows that an earlier prefill engine has gone


class PrefillAgent(AdapterHolder):
    """Agent of a worker that applies adapters and sends KV cache to decode workers."""

    role = "prefill"
    peer_role = "decode"
    served_positions = frozenset({"prefill"})

    def __init__(self, config: ClusterConfig, name: str, scratch: Path) -> None:
        super().__init__(config, name, scratch)
        self._warm: dict[str, str] = {}  # decode worker -> the incarnation that this engine is warm with
        self._cuts: int | None = None  # of heads, as this engine has prepared them; None: not yet
        self._unfit: dict[str, str] = {}  # decode worker that KV cannot go to -> why

    def engine_gone(self) -> None:
        super().engine_gone()
        self._warm.clear()
        self._cuts = None
        self._publish()

    def peer_left(self, name: str) -> None:
        self._warm.pop(name, None)
        self._unfit.pop(name, None)
        self._publish()
        self.reconsider()

    def engine_suspected(self) -> None:
        self._warm.clear()
        self._publish()

    async def run_role(self) -> None:
        """Warm up the pair with every decode engine that is up, again after either engine restarts."""
        warming: dict[Peer, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                warming = {peer: task for peer, task in warming.items() if not task.done()}
                for name, peer in self.peers.items():
                    if peer not in warming:
                        warming[peer] = group.create_task(self._keep_warm(name, peer), name=f"warm {name}")
                await self.peers.change()

    async def _keep_warm(self, name: str, peer: Peer) -> None:
        """Until the peer has left."""
        description = self.describe()
        failed = ("", "")  # the incarnations whose last warm-up has failed
        while self.peers.get(name) is peer:
            ours, theirs = "" if self.hub.state.hung else self.incarnation, peer.incarnation
            if peer.state is not None and peer.state.hung and self._warm.pop(peer.name, ""):
                self._publish()
            if ours and theirs and not self.is_warm_with(peer) and self._fits(description, peer):
                try:
                    await self._warm_up(description, name, peer, ours, theirs, is_retry=failed == (ours, theirs))
                except EngineError as error:
                    failed = ours, theirs
                    if self._warm.pop(peer.name, ""):
                        self._publish()
                    log.warning(
                        "pair warm-up failed; retrying", extra={"fields": {"decode": peer.name, "error": str(error)}}
                    )
                    await asyncio.sleep(_RETRY_S)
            else:
                await asyncio.sleep(0.2)

    async def _warm_up(
        self, description: pb.WorkerDescription, name: str, peer: Peer, ours: str, theirs: str, *, is_retry: bool
    ) -> None:
        """Warm up both engines and the connections between them. Raises EngineError."""

        def note_warm() -> None:
            if ours == self.incarnation and self.peers.get(name) is peer:
                self._warm[peer.name] = theirs
                self._publish()
                self.reconsider()

        is_used = peer.state is not None and peer.state.ready
        if is_used and not self.was_used:  # the peer may be full, and takes part only where it has to
            await warm_engine(self.engine, description.model, to_nobody)
        within_s = TRY_S
        if is_used and not is_retry and peer.state is not None:
            if peer.state.load.awaiting_room_requests:
                note_warm()  # users' requests would wait there as well, behind the one that sets up the connections
            else:
                within_s = FIRST_TRY_S
        await warm_pair(
            self.engine, description.kv_host, description.kv_bootstrap_port, description.model, peer,
            were_used=is_used, within_s=within_s,
        )  # fmt: skip
        note_warm()

    def _fits(self, ours: pb.WorkerDescription, peer: Peer) -> bool:
        """True if KV can go to the peer's engine. Workers of cluster.yaml were checked at start, others were not."""
        theirs = peer.description
        assert theirs is not None
        reason, cuts = "", None
        try:
            cuts = cuts_between(ours.tensor_parallel, theirs.tensor_parallel or ours.tensor_parallel, self.base)
        except ValueError as error:
            reason = f"tensor_parallel is {ours.tensor_parallel} here and {theirs.tensor_parallel} there: {error}"
        if cuts is not None and self._cuts not in (None, cuts):
            reason = (
                f"it needs heads cut in {cuts}, and this engine cuts them in {self._cuts} for another decode worker"
            )
        if (theirs.kv_page_tokens or 1) != ours.kv_page_tokens:
            reason = (
                f"its KV has pages of {theirs.kv_page_tokens or 1} tokens, and this engine's of {ours.kv_page_tokens}"
            )
        if theirs.dtype not in ("", ours.dtype):
            reason = f"its model.dtype is {theirs.dtype}, and this worker's {ours.dtype}"
        if are_known_to_differ(ours.base_weights, theirs.base_weights):
            reason = "its base model has other weights than this worker's; give both the same files in model.path"
        if theirs.engine_version not in ("", ours.engine_version):
            reason = f"it runs SGLang {theirs.engine_version}, not {ours.engine_version}"
        if reason and self._unfit.get(peer.name) != reason:
            log.error(
                "KV transfer to this decode worker is impossible",
                extra={"fields": {"decode": peer.name, "reason": reason}},
            )
        self._unfit[peer.name] = reason
        if cuts is not None and not reason:
            self._cuts = cuts
        return not reason

    def is_warm_with(self, peer: Peer) -> bool:
        return bool(theirs := peer.incarnation) and self._warm.get(peer.name) == theirs

    def _warm_pairs(self) -> list[pb.WarmPair]:
        return [pb.WarmPair(decode_name=name, decode_incarnation=seen) for name, seen in sorted(self._warm.items())]

    def _publish(self) -> None:
        self.hub.update(warm_pairs=self._warm_pairs())
        self.metrics.warm_pairs.set(len(self._warm))
