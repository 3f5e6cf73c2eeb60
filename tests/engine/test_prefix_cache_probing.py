"""Probing SGLang's real prefix cache for what another tenant has asked: no request finds a token of it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.engines.fork_server import SGLANG

from adapters.identity import is_tenant_name
from router.generation.engine_bodies import reader_body
from router.identity.access import SHARED_NAMESPACE
from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, validate

LIMITS = Limits(max_choices=8, vocabulary=1000)
REVISION, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
CORES = ("rust", "python")  # of SGLang's tree: its default, and what it falls back to
PAGES = (1, 64)  # tokens of one: the defaults of CPUs and of GPUs
NUM_SECRET = 128  # tokens of the victim's prompt
# Tenants whose names begin, end or look like the victim's; a name may not contain what separates the parts of a key.
NEIGHBOURS = ("beta", "acm", "acmee", "ACME", "acme-", "acme.sha256", "default")


def key_of(namespace: str, revision: str | None) -> tuple[str, str | None]:
    """What an engine gets from the router for a request in this namespace."""
    validated = validate(Endpoint.COMPLETIONS, b'{"model": "base", "prompt": "Hi"}', LIMITS)
    body = reader_body(next(validated.sequences()), "base", "r", namespace=namespace, revision_id=revision)
    assert isinstance(body, bytes)  # a short one
    fields = msgspec.json.decode(body)
    return fields["extra_key"], fields.get("lora_path")


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    """What each finds with every core and page, in the order of both; the roles that may have each cache; settings."""
    names = (*NEIGHBOURS, "acme#1")  # the last one: of the name's next tenant, once this one is deleted
    of_others = [key_of(tenant, revision) for tenant in names for revision in (None, REVISION, OTHER)]
    adapter, base, shared = key_of("acme", REVISION), key_of("acme", None), key_of(SHARED_NAMESPACE, REVISION)
    cases = (
        [adapter, *of_others, base, shared, key_of("acme", OTHER)],
        [base, *of_others, adapter, key_of(SHARED_NAMESPACE, None)],
        [shared, shared, adapter],
    )
    script = Path(__file__).with_name("prefix_cache_probes.py")
    return SGLANG.printed_by(script, *(json.dumps([core, page, cases]) for core in CORES for page in PAGES))


@pytest.mark.slow
def test_only_the_same_tenant_and_revision_find_a_prompt(probed: dict[str, Any]):
    """And the probe is one: where tenants have agreed to share, it finds everything."""
    assert all(map(is_tenant_name, NEIGHBOURS))
    assert not any(map(is_tenant_name, ("acme|", "|acme", SHARED_NAMESPACE, "", "acme|" + REVISION)))
    assert len(probed["found"]) == len(CORES) * len(PAGES)
    num_others = 3 * (len(NEIGHBOURS) + 1)
    for with_adapter, without, together in probed["found"]:
        assert with_adapter == [NUM_SECRET, [0] * (num_others + 3)]
        assert without == [NUM_SECRET, [0] * (num_others + 2)]
        assert together == [NUM_SECRET, [NUM_SECRET, 0]]


@pytest.mark.slow
def test_caches_that_the_hooks_do_not_change_are_refused(probed: dict[str, Any]):
    """Which of SGLang's own prefix caches the engines of each role accept, and its settings that they refuse."""
    assert probed["accepted"] == {
        "UnifiedRadixCache": ["prefill", "unified"],
        "UnifiedRadixCache without a tree": ["decode", "prefill", "unified"],
        "RadixCache": ["prefill"],
        "RadixCache without a tree": ["decode", "prefill", "unified"],
        "PureSWARadixCache": ["prefill"],
        "PureSWARadixCache without a tree": ["decode", "prefill", "unified"],
    }
    assert probed["settings"] == [
        "enable_flexkv",
        "enable_lmcache",
        "enable_unified_cache_external_linker",
        "hicache_storage_backend",
        "radix_cache_backend",
    ]
