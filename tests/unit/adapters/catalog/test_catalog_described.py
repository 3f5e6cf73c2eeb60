"""A catalog's records as JSON says them."""

from datetime import UTC, datetime

import msgspec

from adapters.catalog.described import history_as_json, revision_as_json
from adapters.catalog.records import AdapterRevision, AliasMove
from adapters.model.manifest import ExpertsEntry, LoraEntry, Manifest


def revision(*experts: ExpertsEntry) -> AdapterRevision:
    lora = () if experts else (LoraEntry(0, "q_proj", 4, 32, 32, 1.0, "float32"),)
    manifest = Manifest("0123456789abcdef", ("lora",), "prefill", lora, (), experts)
    return AdapterRevision("acme", "bot", 7, "sha256:" + "0" * 64, manifest, 100, datetime.now(UTC), stored=True)


def test_a_revision_that_workers_refuse_says_why():
    on_experts = revision(ExpertsEntry(0, "up_proj", ((0, 3),), 4, 32, 48, 1.0, "float32"))
    refused = revision_as_json(on_experts, 0)
    assert "it has LoRA on experts" in refused["not_served"]
    assert "attention only" in refused["not_served"]
    assert "rank 4 on experts, and workers take at most 3" in revision_as_json(on_experts, 3)["not_served"]
    assert revision_as_json(on_experts, 4)["not_served"] == ""
    served = revision_as_json(revision(), 0)
    assert served["not_served"] == ""
    assert served["name"] == "acme/bot"
    said = msgspec.json.decode(msgspec.json.encode(served))
    assert datetime.fromisoformat(said["created_at"]) == served["created_at"]


def test_a_history_says_whether_there_is_more():
    when = datetime(2026, 1, 2, tzinfo=UTC)
    moves = [AliasMove(9, "prod", 1, 2, when, "ann"), AliasMove(4, "prod", None, 1, when, None)]
    newest = {
        "object": "adapter.alias", "name": "acme/bot", "alias": "prod", "from_number": 1, "number": 2,
        "moved_at": when, "moved_by": "ann",
    }  # fmt: skip
    first = {**newest, "from_number": None, "number": 1, "moved_by": None}
    assert history_as_json("acme/bot", moves, 2) == {"object": "list", "data": [newest, first], "has_more": False}
    assert history_as_json("acme/bot", moves, 1) == {"object": "list", "data": [newest], "has_more": True}
