"""Tables of layouts beside each other: a pair, unified workers, stock SGLang; and what KV and streaming cost."""

from __future__ import annotations

from itertools import product
from statistics import fmean, median
from typing import Any

from bench.evidence.cells import fixed, markdown, result
from bench.measuring.result_file import ResultFile

_SYSTEMS = {"pair": "a pair", "unified": "two unified workers"}
_GOODPUT = {name: result(f"goodput-h100x2-{name}.json") for name in _SYSTEMS}
_GOODPUT_LATER = {
    "a pair that sends KV earlier": result("goodput-h100x2-pair-early-sends.json"),
    "a pair, KV in pages of 64": result("goodput-h100x2-pair-pages-64.json"),
}
_ON_TWO_H200 = {
    "two unified workers": result("goodput-h200x2-unified.json"),
    "a pair": result("goodput-h200x2-pair.json"),
    "two unified workers, again": result("goodput-h200x2-unified-again.json"),
}
_IDLE = {
    "one H200": {
        "sleeps": result("idle-h200-llama-3.1-8b.json"),
        "polls": result("idle-h200-llama-3.1-8b-polling-again.json"),
    },
    "another": {
        "polls": result("idle-h200-llama-3.1-8b-polling.json"),
        "sleeps": result("idle-h200-llama-3.1-8b-again.json"),
    },
}
_EARLIER_PAIR = result("sweep-h100x2-pair.json")
_ONE_GPU = {"stock SGLang": result("goodput-h100-stock.json"), "unified worker": result("goodput-h100-unified.json")}
_KV_TRANSFERS = result("kv-transfer-h100x2.json")
_KV_SHAPES = {
    (64, 1 << 20): "512 tokens",
    (64, 4 << 20): "2048 tokens",
    (64, 8 << 20): "4096 tokens",
    (1, 512 << 20): "as many bytes in one piece",
}
_FIRST_TOKENS = [result(f"first-token-h100x2{name}.json") for name in ("", "-200-prompts")]
_TWO_GPUS = [result(f"matrix-pioneer-h100x2-{name}.json") for name in ("none", "stock-pd")]
_LAYOUTS = {"none": "two engines without adapters", "pair": "Prelude's pair", "stock_pd": "SGLang's pair"}
_SENDS = {
    "": result("matrix-pioneer-h100x2-early-sends.json"),
    ", KV sent once the next batch is computed": result("matrix-pioneer-h100x2-late-sends.json"),
}
_CHAT = {
    "as SGLang does: what the cache has of a prompt leaves first": result("matrix-chat-h100x2-pair.json"),
    "all of a prompt leaves together": result("matrix-chat-h100x2-pair-one-send.json"),
}
_KV_PAGES = {"two CPU cores": result("kv-pages-cpu.json"), "two H200": result("kv-pages-h200x2.json")}
_PAGES = {
    machine: {page: [result(f"matrix-pages-{files}-{page}{turn}.json") for turn in ("", "-again")] for page in (1, 64)}
    for machine, files in (("two H200", "h200x2"), ("two H100", "h100x2"))
}
_STAGES = (
    ("prefill-0", "prefill_forward"),
    ("prefill-0", "prefill_transfer_kv_cache"),
    ("decode-0", "decode_transferred"),
)
_STREAMS = {
    "two CPU cores": result("streams-cpu.json"),
    "H100, 8B": result("streams-h100-llama-3.1-8b.json"),
    "H100, 0.5B": result("streams-h100-qwen2.5-0.5b.json"),
    "another H100, 0.5B": result("streams-h100-qwen2.5-0.5b-bound.json"),
}


def goodput() -> str:
    """Every rate that was tried: what came, what was answered, and the share within the objectives."""
    earlier = ("a pair, an earlier run", _EARLIER_PAIR.commit, _EARLIER_PAIR.document)
    files = {_SYSTEMS[name]: file for name, file in _GOODPUT.items()}
    return _probes([earlier, *_sweeps(files | _GOODPUT_LATER)])


def goodput_on_one_machine() -> str:
    """A pair and two unified workers on the same two H200, one after the other."""
    return _probes(_sweeps(_ON_TWO_H200))


def idle() -> str:
    """Pairs whose progress threads sleep and poll, in the order in which they ran on each GPU."""
    rows = [
        (
            gpu,
            does,
            *(fixed(file.document[key], 3) for key in ("scheduler_cores", "cores")),
            *(f"{fixed(file.document[f'first_token_{key}_p50_ms'], 1)} ms" for key in ("after_pause", "without_pause")),
        )
        for gpu, files in _IDLE.items()
        for does, file in files.items()
    ]
    header = ("a pair on", "progress threads", "cores: one scheduler", "all", "TTFT p50 after 0.5 s", "without a pause")
    return markdown(header, rows)


def goodput_of_one_gpu() -> str:
    """Stock SGLang multi-LoRA beside a unified worker, each on a GPU of its own at the same time."""
    return _probes(_sweeps(_ONE_GPU))


def _sweeps(files: dict[str, ResultFile]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(name, file.commit, sweep) for name, file in files.items() for sweep in file.document["rows"]]


def _probes(sweeps: list[tuple[str, str, dict[str, Any]]]) -> str:
    rows = []
    for system, commit, sweep in sweeps:
        slo_ms = sweep["slo_ms"]
        objectives = f"{slo_ms['ttft'] / 1000:g} s, {slo_ms['tpot']:g} ms"
        for probe in sorted(sweep["probes"], key=lambda each: float(each["requests_per_s"])):
            answered = fixed(probe["summary"]["requests_per_s"], 1)
            row = (system, f"`{commit}`", objectives, fixed(_came_per_s(probe), 1), answered, *_latencies(probe))
            rows.append((*row, f"{probe['share']:.0%}"))
    header = (
        "2048 + 128 tokens", "commit", "objectives: TTFT, TPOT", "came/s", "answered/s", "TTFT p50, p99",
        "TPOT p50, p99", "within",
    )  # fmt: skip
    return markdown(header, rows)


def _came_per_s(probe: dict[str, Any]) -> float:
    """Arrivals are random. These files have no `came_per_s`; their probes lasted 20 s, or until 150 were expected."""
    return probe.get("came_per_s") or probe["summary"]["num_requests"] / max(20.0, 150 / probe["requests_per_s"])


def _loads_on_two_gpus() -> dict[str, list[dict[str, Any]]]:
    """Summaries by layout."""
    loads = [load for file in _TWO_GPUS for load in file.document["loads"]]
    return {layout: [load["summary"] for load in loads if load["system"] == name] for name, layout in _LAYOUTS.items()}


def pair_speed() -> str:
    """`two_gpus` in short, for the README."""
    found = _loads_on_two_gpus()
    rates = {layout: fmean(each["requests_per_s"] for each in loads) for layout, loads in found.items()}
    rows = [
        (
            layout,
            f"{rates[layout]:.1f}",
            f"{rates[layout] / rates[_LAYOUTS['none']]:.2f}",
            f"{fmean(each['ttft_ms']['p50'] for each in loads):.0f} ms",
            f"{fmean(each['tpot_ms']['p50'] for each in loads):.1f} ms",
        )
        for layout, loads in found.items()
    ]
    return markdown(("256 + 64 tokens, 32 adapters", "requests/s", "/ no adapters", "TTFT p50", "TPOT p50"), rows)


def two_gpus() -> str:
    """Pioneer's workload with 32 adapters, by each system on the same two GPUs; means of its loads."""
    found = _loads_on_two_gpus()
    header = (
        "256 + 64 tokens, 32 adapters, 64 at a time", "loads of 60 s", "requests/s", "/ no adapters", "/ stock's pair",
        "TTFT p50, p99", "TPOT p50, p99", "within 500 and 50 ms",
    )  # fmt: skip
    return markdown(header, _beside(found, _LAYOUTS["none"], _LAYOUTS["stock_pd"]))


def early_sends() -> str:
    """The same beside a pair without the hooks that send KV while the next batch is computed, on two more GPUs."""
    found: dict[str, list[dict[str, Any]]] = {}
    for when, file in _SENDS.items():
        for load in file.document["loads"]:
            system = f"`{load['system']}`{when if load['system'] == 'pair' else ''}"
            found.setdefault(system, []).append(load["summary"])
    header = (
        "256 + 64 tokens, 32 adapters, 64 at a time", "loads of 45 s", "requests/s", "/ no adapters",
        "TTFT p50, p99", "TPOT p50, p99", "within 500 and 50 ms",
    )  # fmt: skip
    return markdown(header, _beside(found, "`none`"))


def _beside(found: dict[str, list[dict[str, Any]]], *bases: str) -> list[tuple[str, ...]]:
    """Rows of systems by the summaries of their loads, with ratios of requests/s to these systems'."""
    rates = {system: fmean(each["requests_per_s"] for each in loads) for system, loads in found.items()}
    return [
        (
            system,
            str(len(loads)),
            f"{rates[system]:.1f}",
            *(f"{rates[system] / rates[base]:.2f}" for base in bases),
            *(
                f"{fmean(each[key]['p50'] for each in loads):.{digits}f}, "
                f"{fmean(each[key]['p99'] for each in loads):.{digits}f} ms"
                for key, digits in (("ttft_ms", 0), ("tpot_ms", 1))
            ),
            f"{fmean(each['goodput']['share'] for each in loads):.0%}",
        )
        for system, loads in found.items()
    ]


def chat() -> str:
    """Conversations on a pair, whose prompts find most of themselves in the prefix cache; means of the loads."""
    rows = []
    for sends, file in _CHAT.items():
        loads = file.document["loads"]
        summaries = [load["summary"] for load in loads]
        cached = sum(each["cached_prompt_tokens"] for each in summaries) / sum(
            each["prompt_tokens"] for each in summaries
        )
        stages = [load["stages_ms"] for load in loads]
        rows.append(
            (
                sends,
                str(len(loads)),
                f"{fmean(each['requests_per_s'] for each in summaries):.1f}",
                f"{fmean(each['prompt_tokens'] / each['num_requests'] for each in summaries):.0f}",
                f"{cached:.0%}",
                *(f"{fmean(each[worker][stage] for each in stages):.0f} ms" for worker, stage in _STAGES),
            )
        )
    header = (
        "conversations, 16 adapters, 64 at a time", "loads of 40 s", "requests/s", "prompt tokens", "in the cache",
        "in its prefill batch", "in its transfer", "decode waits for KV",
    )  # fmt: skip
    return markdown(header, rows)


def kv_pages() -> str:
    """What one prompt's KV takes between two processes, pages next to one another or anywhere at both ends."""
    blocks: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], list[str]] = {}
    for file in _KV_PAGES.values():
        for row in file.document["rows"]:
            blocks[row["prompt_tokens"], row["page_tokens"]] = row["blocks"]
            found.setdefault((row["prompt_tokens"], row["page_tokens"]), []).append(f"{row['ms']:.1f} ms")
    rows = [
        (f"{prompt} tokens, pages of {page}", str(blocks[prompt, page]), *times)
        for (prompt, page), times in sorted(found.items())
    ]
    places = [f"{machine}, {place}" for machine in _KV_PAGES for place in ("contiguous", "scattered")]
    return markdown(("8B's sizes", "pages of K and V, all layers", *places), rows)


def pages_under_load() -> str:
    """A pair with pages of one token of KV and of 64, the same loads; means of two starts, there and back."""
    rows = []
    for (cell, text), (machine, by_page) in product(
        (("pioneer, n = 32", "256 + 64 tokens"), ("chat, n = 32", "conversations")), _PAGES.items()
    ):
        for page, files in by_page.items():
            loads = [load for file in files for load in file.document["loads"] if load["cell"] == cell]
            summaries = [load["summary"] for load in loads]
            rows.append(
                (
                    f"{text}, {machine}, pages of {page}",
                    ", ".join(f"{each['requests_per_s']:.1f}" for each in summaries),
                    *(f"{fmean(each['ttft_ms'][key] for each in summaries):.0f} ms" for key in ("mean", "p50", "p90")),
                    f"{fmean(each['tpot_ms']['mean'] for each in summaries):.2f} ms",
                    *(
                        f"{fmean(load['stages_ms'][worker][stage] for load in loads):.0f} ms"
                        for worker, stage in _STAGES
                    ),
                )
            )
    header = (
        "32 adapters, 64 at a time", "requests/s", "TTFT mean", "p50", "p90", "TPOT mean", "in its prefill batch",
        "in its transfer", "decode waits for KV",
    )  # fmt: skip
    return markdown(header, rows)


def streams() -> str:
    """What streaming costs an engine's server, by its bound on events per second."""
    rows = []
    for machine, row in ((machine, row) for machine, file in _STREAMS.items() for row in file.document["medians"]):
        bound = f"{row['bound']} events/s" if row["bound"] else "none"
        ratio = f"{row['of_not_streamed']:.2f}" if row["streamed"] else ""
        rows.append(
            (
                machine,
                bound,
                "all streamed" if row["streamed"] else "none streamed",
                f"{row['requests_per_s']:.1f}",
                ratio,
                f"{row['tokens_per_event']:.1f}" if row["streamed"] else "",
                f"{row['server_us_per_token']:.1f} µs",
                f"{row['first_p50_ms']:.0f} ms" if row["streamed"] else "",
            )
        )
    header = (
        "", "bound", "answers", "requests/s", "of none streamed", "tokens per event", "server per token",
        "first event p50",
    )  # fmt: skip
    return markdown(header, rows)


def kv_transfers() -> str:
    """Medians and ranges over the runs with UCX's default settings, as many NIXL threads as a prefill engine has."""
    rows = []
    for (pieces, piece_bytes), name in _KV_SHAPES.items():
        found = [
            row
            for row in _KV_TRANSFERS.document["rows"]
            if (row["pieces"], row["piece_bytes"]) == (pieces, piece_bytes) and row["threads"] and not row["ucx"]
        ]
        moved, copied = (
            [pieces * piece_bytes / row[key] / 1e9 for row in found] for key in ("transfer_s", "copy_s")
        )  # fmt: skip
        ratios = [row["copy_s"] / row["transfer_s"] for row in found]
        rows.append(
            (
                f"{name}: {pieces} x {piece_bytes >> 20} MiB",
                f"{median(moved):.0f} ({min(moved):.0f} to {max(moved):.0f})",
                f"{median(copied):.0f} ({min(copied):.0f} to {max(copied):.0f})",
                f"{median(ratios):.2f}",
                "0.8" if (pieces, piece_bytes) == (64, 8 << 20) else "",
            )
        )
    return markdown(("GPU to GPU, GB/s", "NIXL", "plain copies of the same pieces", "ratio", "goal"), rows)


def first_tokens() -> str:
    """Medians, and means of what the pair's engines count of its stages."""
    rows = []
    found = {
        (row["prompt_tokens"], len(row["first_token_ms"]), row["layout"]): row
        for file in _FIRST_TOKENS
        for row in file.document["rows"]
    }
    runs = sorted({key[:2] for key in found})
    for length, count in runs:
        pair, unified = (found[length, count, layout]["first_token_p50_ms"] for layout in ("pair", "unified"))
        prefill, decode = (found[length, count, "pair"]["stages_ms"][name] for name in ("prefill-0", "decode-0"))
        stages = (prefill["prefill_bootstrap"], prefill["prefill_transfer_kv_cache"], decode["fake_output"])
        p50, means = ([f"{each:.1f} ms" for each in times] for times in ((pair, unified, pair - unified), stages))
        rows.append((f"{count} of {length} tokens", *p50, "5 ms" if length == runs[0][0] else "", *means))
    header = (
        "TTFT p50, one prompt at a time", "a pair", "a unified worker", "difference", "goal",
        "KV handshake", "KV transfer", "decode's first output",
    )  # fmt: skip
    return markdown(header, rows)


def _latencies(probe: dict[str, Any]) -> list[str]:
    found = probe["summary"]
    return [f"{found[key]['p50']:.0f}, {found[key]['p99']:.0f} ms" for key in ("ttft_ms", "tpot_ms")]
