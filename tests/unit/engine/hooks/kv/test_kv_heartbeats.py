"""What a decode engine keeps of a prefill engine that it has given up, by SGLang's own code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOST, OTHER = "10.0.0.1:9000", "10.0.0.2:9000"
# In a process of its own: SGLang's imports change much.
_CODE = f"""
import json, threading
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.common.conn import CommonKVManager
from engine.hooks.kv.heartbeats import begin_anew

manager = SimpleNamespace(
    connection_lock=threading.Lock(),
    connection_pool={{}},
    prefill_info_table={{"{LOST}": None, "{OTHER}": None}},
    addr_to_rooms_tracker={{}},
    heartbeat_failures={{"{LOST}": 3, "{OTHER}": 1}},
)
result = CommonKVManager._handle_node_failure(manager, "{LOST}")
without = dict(manager.heartbeat_failures)
for _ in range(2):
    begin_anew(result, manager, "{LOST}")
print(json.dumps([list(manager.prefill_info_table), without, manager.heartbeat_failures]))
"""


@pytest.mark.slow
def test_the_next_engine_at_an_address_has_no_failures_yet():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    known, without, with_hook = json.loads(done.stdout.splitlines()[-1])
    assert known == [OTHER]
    assert without == {LOST: 3, OTHER: 1}  # at the limit already
    assert with_hook == {OTHER: 1}
