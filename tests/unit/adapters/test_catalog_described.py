"""A catalog's records as JSON says them."""

from datetime import UTC, datetime

import msgspec

from adapters.catalog.described import revision_as_json
from adapters.catalog.records import AdapterRevision
from adapters.manifest import ExpertsEntry, LoraEntry, Manifest


def revision(*experts: ExpertsEntry) -> AdapterRevision:
    lora = () if experts else (LoraEntry(0, "q_proj", 4, 32, 32, 1.0, "float32"),)
    manifest = Manifest("0123456789abcdef", ("lora",), "prefill", lora, (), experts)
    return AdapterRevision("acme", "bot", 7, "sha256:" + "0" * 64, manifest, 100, datetime.now(UTC), stored=True)


def test_a_revision_that_workers_refuse_says_why():
    refused = revision_as_json(revision(ExpertsEntry(0, "up_proj", ((0, 3),), 4, 32, 48, 1.0, "float32")))
    assert "it has LoRA on experts" in refused["not_served"]
    assert "attention only" in refused["not_served"]
    served = revision_as_json(revision())
    assert served["not_served"] == ""
    assert served["name"] == "acme/bot"
    said = msgspec.json.decode(msgspec.json.encode(served))
    assert datetime.fromisoformat(said["created_at"]) == served["created_at"]
