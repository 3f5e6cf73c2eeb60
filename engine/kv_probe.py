"""Moves 1 MiB between two NIXL agents in two processes, like those of a pair.

`python -m engine.kv_probe DEVICE` prints PROBE and DONE among lines of UCX, from which `transports_in` reads the
transports. It is a process of its own because UCX reads its settings once, and because a transport that hangs must not
take its caller with it.
"""

import multiprocessing
import os
import re
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

DONE = "PROBE done"
_NUM_BYTES = 1024**2
_WAIT_S = 40.0
_POLL_S = 0.0002  # a busy loop would take the processor from the receiver
_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}


def main(device: str) -> None:
    here, there = multiprocessing.Pipe()
    os.environ.update(UCX_LOG_LEVEL="info", NIXL_LOG_LEVEL="ERROR")  # UCX writes its lanes to standard output
    receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(there, device), daemon=True)
    receiver.start()
    try:
        _send(here, device)
    finally:
        here.close()
        receiver.terminate()
    print(DONE, flush=True)


def transports_in(log: str) -> list[str]:
    """The transports and devices of the connection between two processes, from UCX's log at level info."""
    lanes = re.findall(r"(?:intra|inter)-node cfg#\d+(.*)", log)
    return sorted({each for line in lanes for group in re.findall(r"\(([^)]*)\)", line) for each in group.split()})


def _send(pipe: Connection, device: str) -> None:
    memory, place = _memory(device, 0)
    agent = _agent("sender")
    registered = agent.register_memory([(*place, "")], _KINDS[device])
    metadata, target = _received(pipe)
    peer = agent.add_remote_agent(metadata)
    handle = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs([place], _KINDS[device]),
        agent.get_xfer_descs([target], _KINDS[device]),
        peer,
    )
    deadline = time.monotonic() + _WAIT_S
    state = agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        if time.monotonic() > deadline:
            raise SystemExit(f"a transfer of {_NUM_BYTES} bytes took over {_WAIT_S:g} s")
        time.sleep(_POLL_S)
        state = agent.check_xfer_state(handle)
    if state == "ERR":
        raise SystemExit("NIXL reports an error")
    agent.release_xfer_handle(handle)
    pipe.send("the end")
    if not _received(pipe):
        raise SystemExit("the bytes that arrived are not those that were sent")
    agent.deregister_memory(registered)
    del memory


def _receive(pipe: Connection, device: str) -> None:
    memory, place = _memory(device, 1)
    agent = _agent("receiver")
    agent.register_memory([(*place, "")], _KINDS[device])
    pipe.send((agent.get_agent_metadata(), place))
    _received(pipe)
    pipe.send(bool((memory == 7).all().item()))
    _received(pipe)  # the sender has gone


def _memory(device: str, number: int) -> tuple[Any, tuple[int, int, int]]:
    """Memory, with a pattern at the sender (0), and its address, bytes and device."""
    if device == "cuda":
        import torch

        index = number % torch.cuda.device_count()
        on_gpu = torch.full((_NUM_BYTES,), 0 if number else 7, dtype=torch.uint8, device=f"cuda:{index}")
        torch.cuda.synchronize(index)
        return on_gpu, (on_gpu.data_ptr(), _NUM_BYTES, index)
    import numpy as np

    array = np.full(_NUM_BYTES, 0 if number else 7, np.uint8)
    return array, (array.ctypes.data, _NUM_BYTES, 0)


def _agent(name: str) -> Any:
    import nixl_cu13._api as nixl

    return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))


def _received(pipe: Connection) -> Any:
    if not pipe.poll(_WAIT_S):
        raise SystemExit(f"the other process says nothing for {_WAIT_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("the other process has ended") from None


if __name__ == "__main__":
    main(sys.argv[1])
