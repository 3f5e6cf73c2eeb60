"""What clients ask of checkpoints and of the runs that made them. A run ends with its session; checkpoints stay."""

import asyncio
import contextlib
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from training.executor.operations import Spec
from training.service.commands import LiveModel
from training.service.errors import NotKnown, Refused
from training.service.identity import name_of
from training.service.journal import Checkpoint, Journal
from training.service.messages import CheckpointTtl, WeightsInfo

WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
_TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler"}
_LEAST_TTL_S, _MOST_TTL_S = 3600, 10 * 365 * 24 * 3600

Answer = dict[str, Any]  # as JSON


class Checkpoints:
    """Everything is its tenant's only. All methods raise ServiceError."""

    def __init__(self, journal: Journal, models: Mapping[str, LiveModel], base_name: str, folder: Path) -> None:
        self._journal, self._models, self._base_name, self._folder = journal, models, base_name, folder

    def get(self, tenant: str, path: str, kind: str) -> Checkpoint:
        found = self._journal.get(Checkpoint, path)
        if found is None or found.tenant != tenant or path.split("/")[3:4] != [kind]:
            raise NotKnown(f"there is no {path[:200]!r} of {kind}; it may have expired")
        return found

    async def weights_info(self, tenant: str, request: WeightsInfo) -> Answer:
        spec = self.get(tenant, request.tinker_path, WEIGHTS).spec
        return {"base_model": self._base_name, **facts_of(spec)}

    def listed(self, tenant: str, limit: int, offset: int) -> Answer:
        """Of all runs, the newest first."""
        own = [_described(each) for each in self._journal.all(Checkpoint, tenant)[::-1]]
        return page("checkpoints", own, limit, offset)

    def listed_of_run(self, tenant: str, run: str) -> Answer:
        """The oldest first."""
        return {"checkpoints": [_described(each) for each in self._of_run(tenant, run)]}

    def _of_run(self, tenant: str, run: str) -> list[Checkpoint]:
        return [each for each in self._journal.all(Checkpoint, tenant) if each.id.split("/")[2] == run]

    def run(self, tenant: str, run: str) -> Answer:
        """One that has ended, as its last checkpoint has it."""
        if not (own := self._of_run(tenant, run)):
            raise NotKnown(f"there is no training run {run[:80]!r}; it may have ended without a checkpoint")
        return self.run_of(run, tenant, own[-1].spec, own[-1].metadata, own[-1].made_s)

    def run_of(self, run: str, tenant: str, spec: Spec, metadata: dict[str, str] | None, seen_s: float) -> Answer:
        return {
            "training_run_id": run,
            "base_model": self._base_name,
            "model_owner": name_of(tenant),
            **facts_of(spec),
            "last_request_time": _time(seen_s),
            "user_metadata": metadata,
        }

    async def set_ttl(self, tenant: str, path: str, kind: str, request: CheckpointTtl) -> None:
        checkpoint, expires_s = self.get(tenant, path, kind), expiry(request.ttl_seconds)
        await asyncio.to_thread(self._journal.change, Checkpoint, checkpoint.id, expires_s=expires_s)

    async def delete(self, checkpoint: Checkpoint) -> None:
        """One that is saved anew meanwhile stays, with its files."""
        await asyncio.to_thread(self._journal.remove, checkpoint)
        path, folder = checkpoint.id, self._folder / checkpoint.folder
        live = self._models.get(path.split("/")[2])
        is_new = self._journal.get(Checkpoint, path) is not None or (live is not None and path in live.making.values())
        if not checkpoint.folder or is_new:
            return
        deleted = folder.with_name(f".{secrets.token_hex(8)}")
        with contextlib.suppress(OSError):  # as if it is gone
            folder.rename(deleted)  # at once, as saves are accepted by this event loop
        await asyncio.to_thread(shutil.rmtree, deleted, ignore_errors=True)

    async def delete_expired(self) -> None:
        now_s = time.time()
        for checkpoint in await asyncio.to_thread(self._journal.all, Checkpoint):
            if checkpoint.expires_s is not None and checkpoint.expires_s <= now_s:
                await self.delete(checkpoint)


def expiry(ttl_s: int | None) -> float | None:
    """When it expires. Raises Refused."""
    if ttl_s is None:
        return None
    if not _LEAST_TTL_S <= ttl_s <= _MOST_TTL_S:
        raise Refused(f"ttl_seconds is {ttl_s}; it is from {_LEAST_TTL_S} to {_MOST_TTL_S}")
    return time.time() + ttl_s


def facts_of(spec: Spec) -> Answer:
    """As the SDK asks for them; the rank is that of ReFT, too."""
    return {"is_lora": spec.kind == "lora", "lora_rank": spec.rank}


def page(name: str, own: Sequence[Answer], limit: int, offset: int) -> Answer:
    cursor = {"limit": limit, "offset": offset, "total_count": len(own)}
    return {name: own[offset : offset + limit], "cursor": cursor}


def _described(checkpoint: Checkpoint) -> Answer:
    return {
        "checkpoint_id": checkpoint.id.split("/", 3)[3],
        "checkpoint_type": _TYPES[checkpoint.id.split("/")[3]],
        "time": _time(checkpoint.made_s),
        "tinker_path": checkpoint.id,
        "expires_at": None if checkpoint.expires_s is None else _time(checkpoint.expires_s),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
