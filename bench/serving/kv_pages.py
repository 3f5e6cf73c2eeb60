"""Benchmark of KV transfers alone: what a prompt's KV takes between two processes, by the tokens of a page.

Two NIXL agents move what SGLang's prefill engine sends: for each layer's K and V and each page of the prompt, one
block. Blocks that follow one another at both ends become one write, so pages next to one another cost little; pages
that are scattered, as after many requests have come and gone, cost a write each.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from bench.errors import BenchError, SystemFailed
from bench.measuring import provenance
from bench.measuring.output import growing_json, require_folders
from bench.systems.models import MODELS

PLACES = ("contiguous", "scattered")
_BYTES_PER_ELEMENT = 2
_WARM_UP = 3
_SENDER_THREADS = 8  # of NIXL, as a prefill engine has; a decode engine has none
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Options:
    """One run of the benchmark."""

    page_tokens: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: tuple[int, ...] = (256, 2048)
    kv_tokens: int = 8192  # of each side's cache
    repeats: int = 9
    model: str = "llama-3.1-8b"  # a key of bench.systems.models.MODELS
    device: str = "cpu"  # or "cuda"
    num_gpus: int = 1  # 2: from one to the other

    def check(self) -> None:
        """Raises BenchError."""
        if MODELS[self.model].config is None:
            raise BenchError(f"--model {self.model}: give one of a published model's sizes")
        for tokens, page in itertools.product((*self.prompt_tokens, self.kv_tokens), self.page_tokens):
            if tokens % page:
                raise BenchError(f"{tokens} tokens are no whole pages of {page}; change --page-tokens or the tokens")
        if 2 * max(self.prompt_tokens) > self.kv_tokens:
            raise BenchError(f"--kv-tokens {self.kv_tokens}: give at least twice the tokens of the longest prompt")
        if self.num_gpus > 2 or (self.device == "cpu" and self.num_gpus > 1):
            raise BenchError(f"--gpus {self.num_gpus}: a transfer is between two GPUs, and on --device cpu none")


QUICK = Options(page_tokens=(16,), prompt_tokens=(64,), kv_tokens=256, repeats=1, model="qwen2.5-0.5b")


@dataclass(frozen=True, slots=True)
class _Cache:
    """Where one side's KV is: a block of memory with one part for each layer's K and V."""

    base: int  # address
    device: int
    num_parts: int
    token_bytes: int  # in one part
    tokens: int

    def pages(self, page_tokens: int) -> Any:
        """Address, bytes and device of every page of every part, in NIXL's form: uint64[parts * pages, 3]."""
        import numpy as np

        page_bytes = self.token_bytes * page_tokens
        addresses = np.uint64(self.base) + np.arange(
            self.num_parts * self.tokens // page_tokens, dtype=np.uint64
        ) * np.uint64(page_bytes)
        sizes, devices = np.full_like(addresses, page_bytes), np.full_like(addresses, self.device)
        return np.column_stack([addresses, sizes, devices])


def run(options: Options, command: str, json_path: Path | None, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure, print a line for each kind of transfer, write the file; returns its content. Raises BenchError."""
    options.check()
    require_folders(json_path)
    rows: list[dict[str, Any]] = []
    document = {**provenance.head("kv-pages", command, asdict(options), options.device), "rows": rows}
    with growing_json(document, json_path, "after all transfers") as write:
        here, there = multiprocessing.get_context("spawn").Pipe()
        receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(there, options), daemon=True)
        receiver.start()
        there.close()  # so that its end is noticed
        try:
            for row in _measured(options, here):
                rows.append(row)
                write()
                progress(_text(row))
        except EOFError as error:
            raise SystemFailed("the receiving process ended; its message is above") from error
        finally:
            here.close()  # ends the receiver
            receiver.join(_WAIT_S)
    return document


def _text(row: dict[str, Any]) -> str:
    return (
        f"  {row['prompt_tokens']:5} tokens in pages of {row['page_tokens']:3} {row['places']:8}: "
        f"{row['blocks']:6} blocks, {row['ms']:7.2f} ms, {row['gb_per_s']:6.2f} GB/s; "
        f"the peer's list took {row['list_ms']:.0f} ms"
    )


def _measured(options: Options, receiver: Connection) -> Iterator[dict[str, Any]]:
    """A row for each prompt, page and place."""
    import numpy as np

    agent, source = _agent_with_cache("sender", options, 0, _SENDER_THREADS)
    if not receiver.poll(_WAIT_S):
        raise SystemFailed(f"the receiving process did not start within {_WAIT_S:g} s")
    metadata, target = receiver.recv()
    peer = agent.add_remote_agent(metadata)
    peer = peer.decode() if isinstance(peer, bytes) else peer
    kind = "DRAM" if options.device == "cpu" else "VRAM"
    random = Random(1)
    for page in options.page_tokens:
        begun = time.perf_counter()
        ours = agent.prep_xfer_dlist("", source.pages(page), kind)
        theirs = agent.prep_xfer_dlist(peer, target.pages(page), kind)
        list_ms = 1000 * (time.perf_counter() - begun)
        num_pages = options.kv_tokens // page
        parts = np.arange(source.num_parts, dtype=np.int32)[:, None] * num_pages

        def blocks(pages: list[int], parts: Any = parts) -> Any:
            return (parts + np.array(pages, dtype=np.int32)).ravel()

        for tokens, places in itertools.product(options.prompt_tokens, PLACES):
            count, took = tokens // page, []
            for _ in range(_WARM_UP + options.repeats):
                if places == "contiguous":
                    first, second = (random.randrange(num_pages - count + 1) for _ in range(2))
                    mine, others = list(range(first, first + count)), list(range(second, second + count))
                else:
                    mine, others = random.sample(range(num_pages), count), random.sample(range(num_pages), count)
                took.append(_transfer(agent, ours, blocks(mine), theirs, blocks(others)))
            receiver.send((page * source.token_bytes, blocks(others)))
            if not receiver.poll(_WAIT_S) or not receiver.recv():
                raise SystemFailed("a transfer is done, but not all of its bytes came")
            ms = 1000 * statistics.median(took[_WARM_UP:])
            num_bytes = tokens * source.token_bytes * source.num_parts
            yield {
                "page_tokens": page,
                "prompt_tokens": tokens,
                "places": places,
                "blocks": count * source.num_parts,
                "ms": round(ms, 3),
                "gb_per_s": round(num_bytes / ms / 1e6, 2),
                "list_ms": round(list_ms, 1),
            }
        agent.release_dlist_handle(ours)
        agent.release_dlist_handle(theirs)


def _transfer(agent: Any, ours: Any, mine: Any, theirs: Any, others: Any) -> float:
    """Seconds of one transfer, its preparation included."""
    begun = time.perf_counter()
    handle = agent.make_prepped_xfer("WRITE", ours, mine, theirs, others, b"")
    state = agent.transfer(handle)
    while state not in ("DONE", "ERR"):
        if time.perf_counter() - begun > _WAIT_S:
            raise SystemFailed(f"a transfer took over {_WAIT_S:g} s")
        time.sleep(0)
        state = agent.check_xfer_state(handle)
    took = time.perf_counter() - begun
    agent.release_xfer_handle(handle)
    if state == "ERR":
        raise SystemFailed("a transfer failed")
    return took


def _receive(sender: Connection, options: Options) -> None:
    """The receiving process: says which blocks were written to, until the sender closes the connection."""
    agent, cache = _agent_with_cache("receiver", options, options.num_gpus - 1)
    memory = agent.kv_memory.zero_()
    sender.send((agent.get_agent_metadata(), cache))
    while True:
        try:
            block_bytes, blocks = sender.recv()
        except (EOFError, OSError):
            return
        have_come = bool(memory.view(-1, block_bytes)[blocks].all())
        memory.zero_()  # before the answer, after which more comes
        sender.send(have_come)


def _agent_with_cache(name: str, options: Options, gpu: int, num_threads: int = 0) -> tuple[Any, _Cache]:
    """A NIXL agent over UCX with as many threads, and a KV cache that is registered with it."""
    try:
        import torch
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
    except ImportError as error:
        raise BenchError(f"{error}; it is in requirements/") from error
    config = MODELS[options.model].config
    assert config is not None
    heads, head_size = config["num_key_value_heads"], config["hidden_size"] // config["num_attention_heads"]
    num_parts, token_bytes = 2 * config["num_hidden_layers"], heads * head_size * _BYTES_PER_ELEMENT
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    memory = torch.ones(num_parts * token_bytes * options.kv_tokens, dtype=torch.uint8, device=device)
    # As SGLang's NixlKVManager makes it: the backend by itself, which gets its threads no other way.
    sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    agent = nixl_agent(name, nixl_agent_config(backends=[], num_threads=num_threads, sync_mode=sync))
    agent.create_backend("UCX", {"num_threads": str(num_threads)} if num_threads else {})
    agent.register_memory([memory])
    agent.kv_memory = memory  # as long as the agent
    return agent, _Cache(memory.data_ptr(), device.index or 0, num_parts, token_bytes, options.kv_tokens)
