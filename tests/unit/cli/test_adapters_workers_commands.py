"""`prelude adapters pin | unpin | prewarm` against agents that record their calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.clusters.served_agent import served

from adapters.model.base_model import BaseModel
from cli.main import main
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlServicer
from cluster.errors import ERROR_CODE_KEY
from samples.random_adapters import write_random_lora

MODEL = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "vocab_size": 100,
}  # fmt: skip


class Agent(WorkerControlServicer):
    """Records its calls, and accepts or refuses them."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses: tuple[grpc.StatusCode, str, str] | None = None  # status, our code, message

    async def PinAdapter(self, request, context) -> pb.PinAdapterResponse:
        await self._take(request, context)
        return pb.PinAdapterResponse()

    async def EnsureAdapter(self, request, context) -> pb.EnsureAdapterResponse:
        await self._take(request, context)
        return pb.EnsureAdapterResponse(load_s=0.5)

    async def _take(self, request, context) -> None:
        self.asked.append(request)
        if self.refuses is not None:
            status, code, message = self.refuses
            await context.abort(status, message, trailing_metadata=((ERROR_CODE_KEY, code),) if code else ())


@pytest.fixture
def agents() -> Iterator[dict[str, tuple[Agent, int]]]:
    first, second = Agent(), Agent()
    with served(first) as first_port, served(second) as second_port:
        yield {"p": (first, first_port), "u": (second, second_port)}


@pytest.fixture
def revision_id(agents, tmp_path: Path, monkeypatch, capsys) -> str:
    """The revision id of the adapter `bot` in the cluster of the working directory."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    write(tmp_path, agents["p"][1], agents["u"][1])
    monkeypatch.chdir(tmp_path)
    write_random_lora(tmp_path / "lora", BaseModel.read(tmp_path), 1, rank=2)
    main(["adapters", "import", "bot", "lora", "--json"])
    return json.loads(capsys.readouterr().out)["revision"]


def write(folder: Path, prefill_port: int, unified_port: int) -> None:
    (folder / "cluster.yaml").write_text(
        "model: {path: ., name: demo}\n"
        "workers:\n"
        f"  p: {{role: prefill, control_port: {prefill_port}}}\n"
        "  d: {role: decode}\n"
        f"  u: {{role: unified, control_port: {unified_port}}}\n"
    )


def prelude(capsys, *arguments: str) -> tuple[int, str, str]:
    status = 0
    try:
        main(["adapters", *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    output = capsys.readouterr()
    return status, output.out, output.err


def test_all_workers_that_hold_adapters_are_asked(agents, revision_id, capsys):
    status, out, errors = prelude(capsys, "pin", "bot", "--deadline", "7")
    assert (status, errors) == (0, "")
    assert out.splitlines() == ["p: bot@r1 is pinned", "u: bot@r1 is pinned"]
    assert prelude(capsys, "unpin", "bot@r1")[0] == 0
    assert prelude(capsys, "prewarm", f"bot@{revision_id}")[1].startswith("p: bot@r1 is in host memory\n")
    assert prelude(capsys, "prewarm", "bot", "--tier", "disk", "--deadline", "9")[0] == 0
    wanted = [
        pb.PinAdapterRequest(revision_id=revision_id, pinned=True, deadline_s=7, tenant="default"),
        pb.PinAdapterRequest(revision_id=revision_id, pinned=False, tenant="default"),
        pb.EnsureAdapterRequest(revision_id=revision_id, deadline_s=60, tier=pb.TIER_HOST, prewarm=True),
        pb.EnsureAdapterRequest(revision_id=revision_id, deadline_s=9, tier=pb.TIER_DISK, prewarm=True),
    ]
    assert agents["p"][0].asked == agents["u"][0].asked == wanted


def test_one_worker(agents, revision_id, capsys):
    status, out, _ = prelude(capsys, "pin", "bot", "--worker", "u", "--json")
    workers = json.loads(out)["workers"]
    assert (status, list(workers)) == (0, ["u"])
    assert 0 <= workers["u"] < 60
    assert (len(agents["p"][0].asked), len(agents["u"][0].asked)) == (0, 1)
    status, _, errors = prelude(capsys, "pin", "bot", "--worker", "d")
    assert status == 2
    assert "no worker 'd' holds adapters; there is p, u" in errors


def test_a_worker_that_refuses(agents, revision_id, capsys):
    agents["p"][0].refuses = grpc.StatusCode.FAILED_PRECONDITION, "adapter_incompatible", "rank 8 is too large"
    agents["u"][0].refuses = grpc.StatusCode.RESOURCE_EXHAUSTED, "", "256 loads wait"
    status, out, errors = prelude(capsys, "prewarm", "bot", "--json")
    assert status == 1
    assert json.loads(out)["workers"] == {
        "p": {"error": {"code": "adapter_incompatible", "message": "rank 8 is too large"}},
        "u": {"error": {"code": "resource_exhausted", "message": "256 loads wait"}},
    }
    assert "prelude: p: adapter_incompatible: rank 8 is too large" in errors
    agents["u"][0].refuses = None
    status, out, errors = prelude(capsys, "prewarm", "bot")
    assert (status, out) == (1, "u: bot@r1 is in host memory\n")


def test_a_worker_that_is_not_there(agents, revision_id, capsys, tmp_path):
    write(tmp_path, 1, agents["u"][1])
    status, out, errors = prelude(capsys, "pin", "bot")
    assert (status, out) == (1, "u: bot@r1 is pinned\n")
    assert "prelude: p: unavailable: " in errors


def test_a_port_that_only_the_supervisor_knows(agents, revision_id, capsys, tmp_path):
    write(tmp_path, 0, agents["u"][1])
    status, _, errors = prelude(capsys, "pin", "bot")
    assert status == 2
    assert "workers.p.control_port is 0" in errors
    assert agents["u"][0].asked == []


def test_an_adapter_that_is_not_there(agents, revision_id, capsys):
    status, _, errors = prelude(capsys, "pin", "bto")
    assert status == 1
    assert "did you mean 'bot'" in errors
    assert prelude(capsys, "pin", "a b")[0] == 2
