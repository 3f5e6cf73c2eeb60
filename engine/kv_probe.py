"""Measures transfers between two NIXL agents in two processes, like those of a pair, and plain copies for comparison.

A prompt's KV cache goes in pieces: K and V of every layer, 64 of them for a model of 32 layers. Each copy is compared
with plain copies of the same pieces, and with one copy of as many bytes.

`python -m engine.kv_probe` prints a line, PROBE and JSON, among those of UCX, from which `transports_in` reads the
transports. It is a process of its own because UCX reads its settings once, and because a transport that hangs must not
take its caller with it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

_WAIT_S = 40.0
_POLL_S = {"cpu": 0.0002, "cuda": 0.00002}  # a busy loop would take the processor from the receiver
_REPEATS = 7  # and one more before, which sets the connection up


@dataclass(frozen=True, slots=True)
class Shape:
    """What a transfer moves: so many pieces of so many bytes, one behind the other."""

    pieces: int
    piece_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @classmethod
    def parse(cls, text: str) -> Shape:
        """From PIECESxKIB."""
        pieces, kibibytes = (int(each) for each in text.split("x"))
        return cls(pieces, kibibytes << 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", action="append", type=Shape.parse, required=True, metavar="PIECESxKIB")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    num_bytes = max(shape.num_bytes for shape in arguments.shape)
    here, there = multiprocessing.Pipe()
    os.environ.update(UCX_LOG_LEVEL="info", NIXL_LOG_LEVEL="ERROR")  # UCX writes its lanes to standard output
    receiver = multiprocessing.get_context("spawn").Process(
        target=_receive, args=(there, num_bytes, arguments.device), daemon=True
    )
    receiver.start()
    try:
        answer = _send(here, num_bytes, arguments.shape, arguments.device)
    finally:
        here.close()
        receiver.terminate()
    print("PROBE", json.dumps(answer), flush=True)


def transports_in(log: str) -> list[str]:
    """The transports and devices of the connection between two processes, from UCX's log at level info."""
    lanes = re.findall(r"(?:intra|inter)-node cfg#\d+(.*)", log)
    return sorted({each for line in lanes for group in re.findall(r"\(([^)]*)\)", line) for each in group.split()})


def _send(pipe: Connection, num_bytes: int, shapes: list[Shape], device: str) -> dict[str, Any]:
    buffer, copy, where = _buffers(num_bytes, device, 0)
    agent = _agent("sender")
    registered = agent.register_memory([(*buffer, "")], _kind(device))
    metadata, target = _received(pipe)
    peer = agent.add_remote_agent(metadata)
    rows = [
        {
            "pieces": shape.pieces,
            "piece_bytes": shape.piece_bytes,
            "transfer_s": _median(partial(_transfer, agent, peer, buffer, target, shape, device)),
            "copy_s": _median(partial(copy, shape)),
            "whole_copy_s": _median(partial(copy, Shape(1, shape.num_bytes))),
        }
        for shape in shapes
    ]
    pipe.send("the end")
    if not _received(pipe):
        raise SystemExit("the bytes that arrived are not those that were sent")
    agent.deregister_memory(registered)
    return {"repeats": _REPEATS, "where": where, "shapes": rows}


def _median(timed: Callable[[], float]) -> float:
    return statistics.median([timed() for _ in range(_REPEATS + 1)][1:])


def _transfer(
    agent: Any, peer: str, source: tuple[int, int, int], target: tuple[int, int, int], shape: Shape, device: str
) -> float:
    """One transfer, its preparation included, s."""
    begun = time.perf_counter()
    handle = agent.initialize_xfer(
        "WRITE",
        agent.get_xfer_descs(_pieces(source, shape), _kind(device)),
        agent.get_xfer_descs(_pieces(target, shape), _kind(device)),
        peer,
    )
    state = agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        if time.perf_counter() - begun > _WAIT_S:
            raise SystemExit(f"a transfer of {shape.num_bytes} bytes took over {_WAIT_S:g} s")
        time.sleep(_POLL_S[device])
        state = agent.check_xfer_state(handle)
    took_s = time.perf_counter() - begun
    if state == "ERR":
        raise SystemExit("NIXL reports an error")
    agent.release_xfer_handle(handle)
    return took_s


def _receive(pipe: Connection, num_bytes: int, device: str) -> None:
    buffer, _, _ = _buffers(num_bytes, device, 1)
    agent = _agent("receiver")
    agent.register_memory([(*buffer, "")], _kind(device))
    pipe.send((agent.get_agent_metadata(), buffer))
    _received(pipe)
    pipe.send(_has_pattern(buffer, device))
    _received(pipe)  # the sender has gone


_kept: list[Any] = []  # what owns the memory


def _buffers(num_bytes: int, device: str, number: int) -> tuple[tuple[int, int, int], Callable[[Shape], float], str]:
    """(address, bytes, device) of memory, with a pattern at the sender; plain copies of it in seconds; where it is."""
    if device == "cuda":
        import torch

        index = number % torch.cuda.device_count()
        other = 1 % torch.cuda.device_count()
        source = torch.full((num_bytes,), 0 if number else 7, dtype=torch.uint8, device=f"cuda:{index}")
        target = torch.empty_like(source, device=f"cuda:{other}")
        _kept.append((source, target))

        def copy(shape: Shape) -> float:
            pairs = [(target[begin:end], source[begin:end]) for begin, end in _bounds(shape)]
            torch.cuda.synchronize(index)
            begun = time.perf_counter()
            for into, piece in pairs:
                into.copy_(piece, non_blocking=True)
            torch.cuda.synchronize(index)
            torch.cuda.synchronize(other)
            return time.perf_counter() - begun

        torch.cuda.synchronize(index)
        return (source.data_ptr(), num_bytes, index), copy, f"GPU 0 to GPU {other}"
    import numpy as np

    memory, into = np.full(num_bytes, 0 if number else 7, np.uint8), np.zeros(num_bytes, np.uint8)
    _kept.append((memory, into))

    def copy_in_memory(shape: Shape) -> float:
        begun = time.perf_counter()
        for begin, end in _bounds(shape):
            np.copyto(into[begin:end], memory[begin:end])
        return time.perf_counter() - begun

    return (memory.ctypes.data, num_bytes, 0), copy_in_memory, "host memory"


def _bounds(shape: Shape) -> list[tuple[int, int]]:
    return [(begin, begin + shape.piece_bytes) for begin in range(0, shape.num_bytes, shape.piece_bytes)]


def _pieces(buffer: tuple[int, int, int], shape: Shape) -> list[tuple[int, int, int]]:
    address, _, index = buffer
    return [(address + begin, end - begin, index) for begin, end in _bounds(shape)]


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
