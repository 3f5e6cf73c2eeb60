"""Tables of docs/simulator.md."""

from __future__ import annotations

from bench.evidence.cells import markdown, result

_SIMULATED = result("simulate-h200.json")
_VALIDATED = result("simulate-validate-h100.json")
_FIGURES = {"throughput_per_s": 1, "ttft_ms_p50": 0, "ttft_ms_p95": 0, "tpot_ms_p50": 1}  # and their digits


def ratios() -> str:
    """The highest rate of each layout, by lengths and objective; the best of each column in bold."""
    found = _SIMULATED.document["answers"]["ratios"]
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
            cells.append(f"**{rate:.1f}**" if rate == best and rate else f"{rate:.1f}")
        rows.append((pools, *cells))
    head = (f"{prompt} + {output}, TPOT {tpot_ms:g} ms" for prompt, output, tpot_ms in columns)
    return markdown(("requests/s within the objectives", *head), rows)


def validated() -> str:
    """A real unified worker beside the simulated one."""
    rows = [
        (
            f"{row['load']:g}",
            f"{row['requests_per_s']:.1f}",
            *(
                f"{row[f'simulated_{name}']:.{digits}f}, {row[f'measured_{name}']:.{digits}f} "
                f"({100 * row[f'error_{name}']:+.0f}%)"
                for name, digits in _FIGURES.items()
            ),
        )
        for row in _VALIDATED.document["rows"]
    ]
    head = ("load", "requests/s", "answered/s: simulated, measured", "TTFT p50, ms", "TTFT p95, ms", "TPOT p50, ms")
    return markdown(head, rows)
