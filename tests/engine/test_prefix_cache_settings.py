"""Which of SGLang's own prefix caches the engines of each role accept."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_caches_that_the_hooks_do_not_change_are_refused():
    command = [sys.executable, Path(__file__).with_name("prefix_cache_kinds.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=500, cwd=ROOT)
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "ChunkCache": ["decode", "prefill", "unified"],
        "RadixCache": ["prefill", "unified"],
        "HiRadixCache": ["prefill", "unified"],
        "UnifiedRadixCache": ["prefill"],
        "PureSWARadixCache": ["prefill"],
        "settings": ["enable_flexkv", "enable_lmcache", "hicache_storage_backend", "radix_cache_backend"],
    }
