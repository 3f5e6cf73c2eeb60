"""Tables of simulated clusters, on docs/simulator.md."""

from __future__ import annotations

from typing import Any

from bench.evidence.cells import markdown, result, wrapped

_SIMULATED = result("simulate-h200.json")
_SCALE = result("simulate-scale.json")
_ROLES = result("simulate-roles-h200.json")
_VALIDATED = result("simulate-validate-h100.json")


def _rows(question: str) -> list[dict[str, Any]]:
    return _SIMULATED.document["answers"][question]


def source() -> str:
    asked = _SIMULATED.document["settings"]
    lines = (
        f"Unless a table says otherwise: {asked['prompt_tokens']} + {asked['output_tokens']} tokens in the mean, "
        f"{asked['num_adapters']:,} adapters, host memory for {asked['host_adapters']} on each worker,",
        f"{asked['base_share']:.0%} of the requests without an adapter, {asked['routers']} routers, "
        f"{asked['seconds']:g} s; {asked['share']:.0%} of the requests with TTFT up to {asked['ttft_ms']:g} ms",
        f"and TPOT up to {asked['tpot_ms']:g} ms. Commit `{_SIMULATED.commit}`, {_SIMULATED.machine}:",
        "",
        "```sh",
        wrapped(_SIMULATED.command),
        "```",
    )
    return "\n".join(lines)


def gpus() -> str:
    rate = _SIMULATED.document["settings"]["requests_per_s"]
    rows = [
        (
            row["pools"],
            str(row["gpus"]),
            *(f"{row[name]:,.0f} ms" for name in ("ttft_ms_p50", "ttft_ms_p95")),
            f"{row['tpot_ms_p95']:.1f} ms",
        )
        for row in _rows("gpus")
        if row["gpus"]
    ]
    return markdown((f"{rate:g} requests/s", "GPUs", "TTFT p50", "TTFT p95", "TPOT p95"), rows)


def slots() -> str:
    rows = [
        (
            str(row["slots"]),
            f"{row['fills_per_request']:.2f}",
            *(f"{row[name]:,.0f} ms" for name in ("ttft_ms_p50", "ttft_ms_p95")),
        )
        for row in _rows("slots")
    ]
    return markdown(("slots", "fills per request", "TTFT p50", "TTFT p95"), rows)


def rack() -> str:
    rows = []
    for row in _rows("rack"):
        back = "gone for good" if row["back_after_s"] is None else f"back after {row['back_after_s']:.0f} s"
        rows.append(
            (
                f"{row['pools']}, {row['lost_workers']} lost, {back}",
                f"{row['requests_per_s']:g}",
                f"{row['normal_ttft_ms_p99']:,.0f} ms",
                f"{row['worst_ttft_ms_p99']:,.0f} ms",
                f"{row['recovery_s']:g} s",
                str(row["retries"]),
                str(row["cut"]),
                str(row["failed"] + row["refused"]),
                str(row["cold_loads_after"]),
            )
        )
    head = (
        "",
        "requests/s",
        "p99 TTFT before",
        "worst",
        "normal again after",
        "tried again",
        "cut",
        "failed",
        "cold loads",
    )
    return markdown(head, rows)


def ratios() -> str:
    found = _rows("ratios")
    columns = list(dict.fromkeys((row["prompt_tokens"], row["output_tokens"], row["tpot_ms"]) for row in found))
    rates = {
        (row["pools"], row["prompt_tokens"], row["output_tokens"], row["tpot_ms"]): row["requests_per_s"]
        for row in found
    }
    rows = []
    for pools in dict.fromkeys(row["pools"] for row in found):
        cells = []
        for column in columns:
            rate, best = rates[pools, *column], max(rates[other["pools"], *column] for other in found)
            text = f"{rate:.1f}"
            cells.append(f"**{text}**" if rate == best and rate else text)
        rows.append((pools, *cells))
    head = (f"{prompt} + {output}, TPOT {tpot_ms:g} ms" for prompt, output, tpot_ms in columns)
    return markdown(("requests/s within the objectives", *head), rows)


def decode_reads() -> str:
    found = _rows("decode-reads")
    rates = {(row["pools"], row["decode_reads_tokens"]): row["requests_per_s"] for row in found}
    tokens = sorted({row["decode_reads_tokens"] for row in found})
    head = (
        "requests/s within the objectives",
        "pairs read all prompts",
        f"decode workers read up to {tokens[-1]} tokens",
    )
    rows = [
        (pools, *(f"{rates[pools, each]:.1f}" for each in tokens))
        for pools in dict.fromkeys(row["pools"] for row in found)
    ]
    return markdown(head, rows)


def roles() -> str:
    rows = [
        (
            f"{row['pools']}, {row['layout']}" if "unified" not in row["layout"] else row["pools"],
            f"{row['good_share']:.1%}",
            f"{row['ttft_ms_p95']:,.0f} ms",
            f"{row['tpot_ms_p95']:.1f} ms",
            str(row["changes"]),
            str(row["cut"] + row["failed"]),
        )
        for row in _ROLES.document["answers"]["roles"]
    ]
    table = markdown(("", "within the objectives", "TTFT p95", "TPOT p95", "changes", "lost"), rows)
    return f"{table}\n\n`{_ROLES.command}`, commit `{_ROLES.commit}`"


def scale() -> str:
    rows = [
        (
            f"{row['share_of_fleet']:.0%}: {row['workers']:,} workers, {row['adapters']:,} adapters",
            f"{row['requests_per_s']:,}",
            f"{row['requests_per_cpu_s']:,}",
            f"{row['events_per_cpu_s']:,}",
            f"{row['ttft_ms_p99']:,.0f} ms",
            f"{row['memory_mib']:,} MiB",
        )
        for row in _SCALE.document["answers"]["scale"]
    ]
    head = ("", "requests/s", "requests per CPU second", "events per CPU second", "TTFT p99", "memory")
    return f"{markdown(head, rows)}\n\n`{_SCALE.command}`, commit `{_SCALE.commit}`"


def validated() -> str:
    figures = {"throughput_per_s": 1, "ttft_ms_p50": 0, "ttft_ms_p95": 0, "tpot_ms_p50": 1}
    rows = [
        (
            f"{row['load']:g}",
            f"{row['requests_per_s']:.1f}",
            *(
                f"{row[f'simulated_{name}']:.{digits}f}, {row[f'measured_{name}']:.{digits}f} "
                f"({100 * row[f'error_{name}']:+.0f}%)"
                for name, digits in figures.items()
            ),
        )
        for row in _VALIDATED.document["rows"]
    ]
    head = ("load", "requests/s", "answered/s: simulated, measured", "TTFT p50, ms", "TTFT p95, ms", "TPOT p50, ms")
    return markdown(head, rows)


def measured() -> str:
    names = {"none": "no adapters", "unified_lora": "LoRA rank 16, 128 adapters"}
    rows = [
        (
            names[row["system"]],
            f"{row['simulated_requests_per_s']:.1f}",
            f"{row['measured_requests_per_s']:.1f}",
            f"{row['rate_ratio']:.2f}",
            f"{row['simulated_latency_s']:.2f} s",
            f"{row['measured_latency_s']:.2f} s",
            f"{row['latency_ratio']:.2f}",
        )
        for row in _rows("measured")
    ]
    head = ("", "simulated requests/s", "measured", "ratio", "simulated median latency", "measured", "ratio")
    return markdown(head, rows)
