"""Measures transfers between two NIXL agents in two processes, like those of a pair, and a plain copy for comparison.

`python -m engine.kv_probe` prints a line, PROBE and JSON, among those of UCX, from which `transports_in` reads the
transports. It is a process of its own because UCX reads its settings
once, and because a transport that hangs must not take its caller with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

_WAIT_S = 40.0
_POLL_S = 0.0002
_PAGE_BYTES = 1 << 20  # KV goes in pieces
_REPEATS = 7  # and one more before, which sets the connection up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=64)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    num_bytes = arguments.mebibytes << 20
    here, there = multiprocessing.Pipe()
    os.environ.update(UCX_LOG_LEVEL="info", NIXL_LOG_LEVEL="ERROR")  # UCX writes its lanes to standard output
    receiver = multiprocessing.get_context("spawn").Process(
        target=_receive, args=(there, num_bytes, arguments.device), daemon=True
    )
    receiver.start()
    try:
        answer = _send(here, num_bytes, arguments.device)
    finally:
        here.close()
        receiver.terminate()
    print("PROBE", json.dumps(answer), flush=True)


def transports_in(log: str) -> list[str]:
    """The transports and devices of the connection between two processes, from UCX's log at level info."""
    lanes = re.findall(r"(?:intra|inter)-node cfg#\d+(.*)", log)
    return sorted({each for line in lanes for group in re.findall(r"\(([^)]*)\)", line) for each in group.split()})


def _send(pipe: Connection, num_bytes: int, device: str) -> dict[str, Any]:
    buffer, copy, where = _buffers(num_bytes, device, 0)
    agent = _agent("sender")
    registered = agent.register_memory([(*buffer, "")], _kind(device))
    metadata, target = _received(pipe)
    peer = agent.add_remote_agent(metadata)
    durations = []
    for _ in range(_REPEATS + 1):
        begun = time.perf_counter()
        handle = agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs(_pages(buffer), _kind(device)),
            agent.get_xfer_descs(_pages(target), _kind(device)),
            peer,
        )
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            if time.perf_counter() - begun > _WAIT_S:
                raise SystemExit(f"a transfer of {num_bytes} bytes took over {_WAIT_S:g} s")
            time.sleep(_POLL_S)  # a busy loop would take the processor from the receiver
            state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise SystemExit("NIXL reports an error")
        durations.append(time.perf_counter() - begun)
        agent.release_xfer_handle(handle)
    copies = [copy() for _ in range(_REPEATS + 1)]
    pipe.send("the end")
    if not _received(pipe):
        raise SystemExit("the bytes that arrived are not those that were sent")
    agent.deregister_memory(registered)
    return {
        "mebibytes": num_bytes >> 20,
        "repeats": _REPEATS,
        "where": where,
        "transfer_bytes_per_s": num_bytes / statistics.median(durations[1:]),
        "copy_bytes_per_s": num_bytes / statistics.median(copies[1:]),
    }


def _receive(pipe: Connection, num_bytes: int, device: str) -> None:
    buffer, _, _ = _buffers(num_bytes, device, 1)
    agent = _agent("receiver")
    agent.register_memory([(*buffer, "")], _kind(device))
    pipe.send((agent.get_agent_metadata(), buffer))
    _received(pipe)
    pipe.send(_has_pattern(buffer, device))
    _received(pipe)  # the sender has gone


_kept: list[Any] = []  # what owns the memory


def _buffers(num_bytes: int, device: str, number: int) -> tuple[tuple[int, int, int], Any, str]:
    """(address, bytes, device) of memory, with a pattern at the sender; a plain copy of it in seconds; where it is."""
    if device == "cuda":
        import torch

        index = number % torch.cuda.device_count()
        other = 1 % torch.cuda.device_count()
        source = torch.full((num_bytes,), 0 if number else 7, dtype=torch.uint8, device=f"cuda:{index}")
        target = torch.empty_like(source, device=f"cuda:{other}")
        _kept.append((source, target))

        def copy() -> float:
            torch.cuda.synchronize(index)
            begun = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(index)
            torch.cuda.synchronize(other)
            return time.perf_counter() - begun

        torch.cuda.synchronize(index)
        return (source.data_ptr(), num_bytes, index), copy, f"GPU 0 to GPU {other}"
    import numpy as np

    memory, into = np.full(num_bytes, 0 if number else 7, np.uint8), np.zeros(num_bytes, np.uint8)
    _kept.append((memory, into))

    def copy_in_memory() -> float:
        begun = time.perf_counter()
        np.copyto(into, memory)
        return time.perf_counter() - begun

    return (memory.ctypes.data, num_bytes, 0), copy_in_memory, "host memory"


def _pages(buffer: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    address, num_bytes, index = buffer
    return [(address + begin, min(_PAGE_BYTES, num_bytes - begin), index) for begin in range(0, num_bytes, _PAGE_BYTES)]


def _has_pattern(buffer: tuple[int, int, int], device: str) -> bool:
    memory = _kept[0][0]
    return bool((memory == 7).all().item())


def _agent(name: str) -> Any:
    import nixl_cu13._api as nixl

    return nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))


def _kind(device: str) -> str:
    return "VRAM" if device == "cuda" else "DRAM"


def _received(pipe: Connection) -> Any:
    if not pipe.poll(_WAIT_S):
        raise SystemExit(f"the other process says nothing for {_WAIT_S:g} s")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("the other process has ended") from None


if __name__ == "__main__":
    main()
