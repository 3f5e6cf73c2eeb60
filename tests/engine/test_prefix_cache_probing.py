"""Probing SGLang's real prefix cache for what another tenant has asked: no request finds a token of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.identity import is_tenant_name
from router.generation.engine_bodies import reader_body
from router.identity.access import SHARED_NAMESPACE
from router.protocol.field_values import Limits
from router.protocol.validation import Endpoint, validate

ROOT = Path(__file__).parents[2]
LIMITS = Limits(max_choices=8, vocabulary=1000)
REVISION, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
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


def found(core: str, page: int, *cases: list[tuple[str, str | None]]) -> list[list[Any]]:
    """For each case, cached tokens that the first of it finds of its own prompt, and those that each other finds."""
    script = Path(__file__).with_name("prefix_cache_namespaces.py")
    command = [sys.executable, script, core, str(page), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 64])  # tokens of one: the defaults of CPUs and of GPUs
@pytest.mark.parametrize("core", ["rust", "python"])  # of SGLang's tree: its default, and what it falls back to
def test_only_the_same_tenant_and_revision_find_a_prompt(core: str, page: int):
    """And the probe is one: where tenants have agreed to share, it finds everything."""
    assert all(map(is_tenant_name, NEIGHBOURS))
    assert not any(map(is_tenant_name, ("acme|", "|acme", SHARED_NAMESPACE, "", "acme|" + REVISION)))
    names = (*NEIGHBOURS, "acme#1")  # the last one: of the name's next tenant, once this one is deleted
    of_others = [key_of(tenant, revision) for tenant in names for revision in (None, REVISION, OTHER)]
    adapter, base, shared = key_of("acme", REVISION), key_of("acme", None), key_of(SHARED_NAMESPACE, REVISION)
    with_adapter, without, together = found(
        core,
        page,
        [adapter, *of_others, base, shared, key_of("acme", OTHER)],
        [base, *of_others, adapter, key_of(SHARED_NAMESPACE, None)],
        [shared, shared, adapter],
    )
    assert with_adapter == [NUM_SECRET, [0] * (len(of_others) + 3)]
    assert without == [NUM_SECRET, [0] * (len(of_others) + 2)]
    assert together == [NUM_SECRET, [NUM_SECRET, 0]]


@pytest.mark.slow
def test_caches_that_the_hooks_do_not_change_are_refused():
    """Which of SGLang's own prefix caches the engines of each role accept, and its settings that they refuse."""
    command = [sys.executable, Path(__file__).with_name("prefix_cache_kinds.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "UnifiedRadixCache": ["prefill", "unified"],
        "UnifiedRadixCache without a tree": ["decode", "prefill", "unified"],
        "RadixCache": ["prefill"],
        "RadixCache without a tree": ["decode", "prefill", "unified"],
        "PureSWARadixCache": ["prefill"],
        "PureSWARadixCache without a tree": ["decode", "prefill", "unified"],
        "settings": [
            "enable_flexkv",
            "enable_lmcache",
            "enable_unified_cache_external_linker",
            "hicache_storage_backend",
            "radix_cache_backend",
        ],
    }
