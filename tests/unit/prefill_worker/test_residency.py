"""Which adapters become resident on which role."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from adapters.errors import AdapterUnsupported
from adapters.formats import Limits
from adapters.manifest import Manifest
from adapters.revision import Revision
from cluster.worker_metrics import WorkerMetrics
from cluster.worker_state import WorkerStateHub
from prefill_worker import residency
from prefill_worker.agent import PrefillAgent
from prefill_worker.residency import Residency
from prefill_worker.unified_agent import UnifiedAgent

REVISION_ID = "sha256:" + "ab" * 32


class EngineStandIn:
    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def load_adapter(self, revision_id: str, directory: Path, timeout_s: float) -> None:
        self.loaded.append(revision_id)


@pytest.fixture
def ensure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has a role's residency load one adapter; what its engine and its state hold then."""
    monkeypatch.setattr(residency, "read_revision", lambda *_: None)
    monkeypatch.setattr(residency, "write_for_engine", lambda *_: None)

    def run(agent: type[PrefillAgent] | type[UnifiedAgent], positions: str) -> tuple[list[str], set[str]]:
        manifest = Manifest("base", ("lora",), positions, (), ())
        revision = Revision("default", "tone", REVISION_ID, tmp_path, manifest, 0)
        hub, engine = WorkerStateHub(), EngineStandIn()
        limits: Any = Limits()
        one = Residency(
            {REVISION_ID: revision},
            None,  # type: ignore[arg-type]
            limits,
            "float32",
            agent.served_positions,
            tmp_path / "cache",
            hub,
            WorkerMetrics("w", agent.role),
        )
        asyncio.run(one.ensure(REVISION_ID, engine))  # type: ignore[arg-type]
        return engine.loaded, hub.resident

    return run


@pytest.mark.parametrize(
    ("agent", "positions"), [(PrefillAgent, "prefill"), (UnifiedAgent, "prefill"), (UnifiedAgent, "all")]
)
def test_accepted(ensure: Any, agent: Any, positions: str):
    assert ensure(agent, positions) == ([REVISION_ID], {REVISION_ID})


def test_a_prefill_worker_refuses_adapters_that_act_everywhere(ensure: Any):
    with pytest.raises(AdapterUnsupported, match="tone acts on 'all' positions, which only a unified worker can serve"):
        ensure(PrefillAgent, "all")
