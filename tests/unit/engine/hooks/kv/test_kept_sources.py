"""A prefill engine's pages of a failed room are kept while NIXL may read them, on all ranks or on none."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: SGLang's imports change much.
_CODE = """
import json, sys
from collections import defaultdict
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch.distributed as dist
from sglang.srt.disaggregation.base import KVPoll
from engine.hooks.kv.kept_sources import with_kept_sources

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
manager = SimpleNamespace(_staging_outstanding=defaultdict(int), _deferred_ack_poisoned_rooms=set())
senders = [SimpleNamespace(kv_mgr=manager, bootstrap_room=room) for room in (1, 2, 3, None)]
states = [KVPoll.Failed, KVPoll.Failed, KVPoll.Success, KVPoll.Failed]  # the last one has no decode engine
group = dist.group.WORLD
poll = with_kept_sources(lambda *_: list(map(int, states)))
seen = []

def look():
    seen.append([each == KVPoll.Transferring for each in poll(senders, group, group)])

look()
manager._staging_outstanding[1] = 1  # a chunk that a thread has taken, and NIXL has not finished
look()
manager._staging_outstanding[1] = 0
look()
manager._staging_outstanding[2] = 1
manager._deferred_ack_poisoned_rooms.add(2)  # a write of it has failed, and this one may never end
look()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_pages_are_kept_while_a_chunk_is_on_its_way(tmp_path):
    command = [sys.executable, "-c", _CODE, str(tmp_path / "ranks")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    before, under_way, after, broken = json.loads(done.stdout.splitlines()[-1])
    assert before == after == broken == [False] * 4
    assert under_way == [True, False, False, False]
