"""Published numbers are those of bench/results/: the charts, quoted numbers, and every file is named."""

import re
from collections import defaultdict
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from bench import evidence
from bench.evidence import document

FILES = sorted(evidence.RESULTS.glob("*.json"))


def words_of(page: str) -> str:
    return " ".join((evidence.ROOT / page).read_text().split())


def fixed(value: float, num_digits: int) -> str:
    """Rounded half up from the digits that the file has."""
    return str(Decimal(str(value)).quantize(Decimal(1).scaleb(-num_digits), ROUND_HALF_UP))


# ---- the charts and whole tables -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", evidence.CHARTS)
def test_charts_are_what_the_results_give(name: str):
    assert (evidence.IMAGES / name).read_text() == evidence.CHARTS[name](), "run: python -m bench.evidence"


_ALL, _WHOLE = "prompt, linear layers too", "KV and state"
HYBRIDS = {  # rows of the page: model, adapter and what it shaped of a prompt's cache
    "attention only": ("attention", "prompt", _WHOLE),
    "hybrid": ("hybrid, slow", _ALL, _WHOLE),
    "hybrid, fast decays": ("hybrid, fast", _ALL, _WHOLE),
    "hybrid, the adapter's KV with the base's state": ("hybrid, slow", _ALL, "KV"),
    "hybrid, the base's KV with the adapter's state": ("hybrid, slow", _ALL, "state"),
    "gated delta nets only": ("linear, slow", _ALL, None),
}


def test_the_study_of_hybrids_shows_what_its_page_says():
    page = words_of("docs/decisions/0033-hybrids-are-refused-for-their-engines.md")
    rows = document("hybrid-positions-cpu")["rows"]
    for name, which in HYBRIDS.items():
        found = [row["right"] for row in rows if (row["kind"], row["arm"], row.get("shipped")) == which]
        shares = " | ".join(fixed(fmean(each[length] for each in found), 2) for length in found[0])
        assert f"| {name} | {shares} |" in page
    for kind in ("hybrid, slow", "hybrid, fast", "linear, slow"):
        lives = [life for row in rows if (row["kind"], row["arm"]) == (kind, "base") for life in row["half_lives"]]
        assert f"{min(lives):.2g} to {max(lives):.3g} tokens ({median(lives):.2g} in the median)" in page


def test_the_simulators_errors_are_those_of_the_file():
    rows = document("simulate-validate-h100")["rows"]
    rate, tpot = (max(abs(row[f"error_{name}"]) for row in rows) for name in ("throughput_per_s", "tpot_ms_p50"))
    early = -min(row["error_ttft_ms_p50"] for row in rows)
    assert rate < 0.01
    text = f"throughput was within 1%, median TPOT within {tpot:.0%}, and median TTFT up to {early:.0%} too early"
    assert text in words_of("docs/simulator.md")


def test_the_study_of_positions_shows_what_its_page_says():
    page = (evidence.ROOT / "docs/positions.md").read_text()
    lines = [each for each in document("positions-h200x2")["compared"] if each["rank"] == 16 and each["num_seeds"] == 3]
    behind: dict[str, list[float]] = defaultdict(list)
    for each in lines:
        low, mean, high = (fixed(min(max(each["exact"][name], 0), 1), 2) for name in ("low", "mean", "high"))
        assert f" {mean} ({low}\u2013{high}) |" in page, each
        if "behind" in each:
            behind[each["arm"]].append(each["behind"]["mean"])
    assert len(behind["converted"]) == 10  # five tasks, two kinds
    assert max(behind["converted"]) < 0.025
    assert max(behind["prefill"]) < 0.035
    assert max(each["exact"]["mean"] for each in lines if each["arm"] == "all as prefill") < 0.27
    variants = page.split("| exact answers, LoRA | ")[1].split("\n\n")[0]
    assert "| 120 steps each, five tasks | 0.99 (0.98\u20130.99) | 0.99" in variants
    for line in variants.splitlines()[4:]:  # converted beside all positions: ranks 4 and 64, a longer answer
        every, _, converted = (float(cell.split()[0]) for cell in line.split(" | ")[1:])
        assert converted > every - 0.02


COUNTS = (1, 32, 512)  # adapters in use
OWN = document("adapter-tax-h200-llama-3.1-8b-rank16-two-repeats")
STOCK = document("adapter-tax-h200-llama-3.1-8b-rank16-stock-two-repeats")
Document = dict[str, Any]


# ---- quoted numbers -------------------------------------------------------------------------------------------------


def ratio(file: Document, system: str, count: int, to: str = "none") -> float:
    """Of the medians of both systems' runs with so many adapters."""
    of, base = (
        median(row["requests_per_s"] for row in file["rows"] if (row["system"], row["adapters"]) == (each, count))
        for each in (system, to)
    )
    return of / base


def ratios(file: Document, system: str) -> list[str]:
    return [fixed(ratio(file, system, count), 2) for count in COUNTS]


def on_an_h200() -> str:
    lora, stock = ratios(OWN, "unified_lora"), ratios(STOCK, "stock")
    return f"LoRA {', '.join(lora)} of none at n = 1, 32, 512; stock {', '.join(stock)}."


def direft() -> str:
    return f"{', '.join(ratios(OWN, 'unified_direft'))} of none"


def long_prompts() -> str:
    names = ("h100-llama-3.1-8b-prompt2048-lora-segments", "h100-llama-3.1-8b-prompt2048-direft-no-wait")
    lora, reft = (document(f"adapter-tax-{name}")["ratios"] for name in names)
    return f"LoRA {fixed(lora['c/a']['32'], 3)} of none; DiReFT {fixed(reft['d/a']['32'], 3)} (one load)"


def fp8() -> str:
    rates = {
        (name, load["system"]): load["summary"]["requests_per_s"]
        for name in ("fp8", "bf16")
        for load in document(f"adapter-tax-h200-{name}")["loads"]
        if load["cell"] == "adapter-tax-long, n = 32"
    }
    (quantized, of_quantized), (plain, of_plain) = (
        (fixed(rates[name, "unified"], 1), fixed(rates[name, "unified"] / rates[name, "none"], 2))
        for name in ("fp8", "bf16")
    )
    [goodput] = document("goodput-h200-fp8")["rows"]
    return (
        f"LoRA {quantized} requests/s ({plain} in bfloat16), {of_quantized} of none ({of_plain}). One unified worker "
        f"holds {fixed(goodput['best_requests_per_s'], 1)}/s at {goodput['slo_ms']['tpot']:g} ms"
    )


def all_positions() -> str:
    file = document("adapter-tax-h200-llama-3.1-8b-all-shares")
    adapted = [ratio(file, "unified_lora@1", 32, to) for to in ("none", "stock")]
    return f"{fixed(adapted[0], 2)} of none, {fixed(adapted[1], 2)} times stock"


def pairs() -> str:
    rates: dict[str, list[float]] = defaultdict(list)
    for name in ("none", "stock-pd"):
        for load in document(f"matrix-pioneer-h100x2-{name}")["loads"]:
            rates[load["system"]].append(load["summary"]["requests_per_s"])
    times = sum(rates["pair"]) / len(rates["pair"]) / (sum(rates["stock_pd"]) / len(rates["stock_pd"]))
    return f"{times:.2f} times the requests/s"


def objectives() -> str:
    best: dict[tuple[str, str, float], str] = {}
    for name in ("prelude", "stock", "none"):
        for row in document(f"goodput-h200x2-{name}")["rows"]:
            if not row["ended"] and row["prompt_tokens"] == 2048:
                best[name, row["layout"], row["slo_ms"]["tpot"]] = f"{row['best_requests_per_s']:.1f}"
    pair, unified = ({tpot: best["prelude", layout, tpot] for tpot in (10, 20, 50)} for layout in ("1p+1d", "2u"))
    none = f"{best['none', '1p+1d', 20]} and {best['none', '2u', 20]}"
    return (
        f"TPOT 20 ms: pair {pair[20]}, unified {unified[20]} requests/s; 10 ms: {pair[10]} and {unified[10]}; "
        f"50 ms: {pair[50]} and {unified[50]}. Two stock multi-LoRA engines {best['stock', '2u', 20]} at 20 ms; "
        f"no adapters {none}."
    )


def four_gpus() -> str:
    best = {name: fixed(evidence.best(name), 1) for name in evidence.SYSTEMS}
    stock = (
        f"stock 3 + 1 with LoRA on both sides {best['stock-3p1d']}, four stock multi-LoRA engines {best['stock-4u']}"
    )
    own = f"3 prefill + 1 decode {best['prelude-3p1d']} requests/s; four unified workers {best['prelude-4u']}"
    return f"{own}; {stock}; no adapters {best['none-3p1d']} (3 + 1)"


def sweep() -> str:
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for figure in document("matrix-sweep-cpu")["figures"]:
        if figure["name"] == "answered":
            rates[figure["system"]][int(figure["cell"].rpartition(" = ")[2])] = figure["value"]
    own = rates["unified"].values()
    return f"unified worker {min(own):.0f} to {max(own):.0f} requests/s, stock {rates['stock'][1]:.0f} to "


def workloads() -> str:
    parts = document("matrix-cpu")["ratios"]
    times = [each["ratio"] for each in parts if (each["system"], each["name"]) == ("unified", "answered")]
    return f"unified worker {min(times):.2f} to {max(times):.2f} times stock"


def soak() -> str:
    return f"{document('soak-cpu')['outcomes']['answered']:,} answers, none wrong"


def generator() -> str:
    return f"{round(document('load-capacity-cpu')['events_per_cpu_s'], -3):,.0f} events per second of CPU time"


def policies() -> str:
    every = document("policies-h200")["ratios"]
    plain, turns = ([fixed(each[name], 2) for each in every] for name in ("alone/plain", "turns/alone"))
    return (
        f"{plain[0]}, {plain[1]} and {plain[2]} times the tokens/s of `prelude train sft`'s loop; "
        f"in turns {turns[0]}, {turns[1]} and {turns[2]} times"
    )


def role_changes() -> str:
    file = document("role-changes-h200x2")
    drained, ready = ([each[name] for each in file["changes"]] for name in ("drained_s", "ready_s"))
    assert file["load"]["num_failed"] == 0
    return (
        f"{len(drained)} changes: {median(drained):.1f} s to drain and {median(ready):.1f} s until serving (medians; "
        f"at most {max(drained):.1f} and {max(ready):.1f}); none of {file['load']['num_requests']:,} requests failed, "
        f"TPOT p99 {file['load']['tpot_ms']['p99']:.1f} ms"
    )


def turn() -> str:
    file = document("turn-h200-quarters")
    rows = {row["system"]: row["windows"] for row in file["rows"]}

    def share(system: str, tpot_ms: str, end_s: float, from_s: float = 0) -> str:
        windows = [each for each in rows[system] if from_s <= each["from_s"] < end_s]
        num_good = sum(each["num_good"][tpot_ms] for each in windows)
        return fixed(num_good / sum(each["num_requests"] for each in windows), 2)

    def spread(part: str) -> str:
        seconds = [each[part] for each in file["rows"][1]["changes"]]
        return f"{fixed(min(seconds), 1)} to {fixed(max(seconds), 1)}"

    served = [each["served_at_s"] % 40 for each in file["rows"][1]["changes"]]
    first = [fixed(each, 0) for each in sorted(served) if each < 12]
    text = f"serves {first[0]} to {first[-1]} s after a turn, a second {fixed(served[2] - served[1], 0)} s later"
    assert text in words_of("docs/workers.md")
    both = ("roles that follow the load", "4 unified")
    phases = [share(both[0], "20", from_s + 40, from_s) for from_s in (0, 40, 80)]
    first = {tpot_ms: [share(each, tpot_ms, 95) for each in both] for tpot_ms in ("20", "30", "50")}
    return (
        f"within TTFT 2 s and TPOT 20 ms: 2 prefill + 2 decode {share('2 prefill + 2 decode', '20', 120)}, {both[0]} "
        f"{share(both[0], '20', 120)} (phases: {', '.join(phases)}). First 95 s: {first['20'][0]}, {both[1]} "
        f"{first['20'][1]}; within 30 ms {' and '.join(first['30'])}, within 50 ms {' and '.join(first['50'])}. "
        f"The unified workers' last 25 s were not recorded. Changes: {spread('drained_s')} s to drain, "
        f"{spread('switched_s')} s until serving"
    )


@pytest.mark.parametrize(
    "quote",
    [
        on_an_h200,
        direft,
        long_prompts,
        fp8,
        all_positions,
        pairs,
        objectives,
        four_gpus,
        sweep,
        workloads,
        policies,
        role_changes,
        turn,
        soak,
        generator,
    ],
    ids=lambda quote: quote.__name__,
)
def test_the_page_quotes_what_the_file_has(quote: Callable[[], str]):
    assert quote() in words_of("docs/evidence.md")


def test_the_readme_quotes_what_the_files_have():
    readme = words_of("README.md")
    lora, stock = ratio(OWN, "unified_lora", 512), ratio(STOCK, "stock", 512)
    assert f"**{fixed(lora, 2)} of the base model's throughput with 512 adapters**" in readme
    assert f"stock SGLang's multi-LoRA has {fixed(stock, 2)}" in readme
    best = {name: evidence.best(name) for name in evidence.SYSTEMS}
    rate, times = best["prelude-3p1d"], {name: fixed(best["prelude-3p1d"] / each, 1) for name, each in best.items()}
    assert f"**{fixed(rate, 0)} requests/s on four H200 with 3 prefill and 1 decode worker**" in readme
    stock_too = (
        f"{times['stock-4u']} times four stock multi-LoRA engines, {times['stock-3p1d']} times stock SGLang's own"
    )
    assert f"{stock_too} 3 + 1, and {times['prelude-4u']} times four unified workers" in readme
    assert f"Without adapters stock SGLang held {fixed(best['none-3p1d'], 0)} in the same layout" in readme
    assert f"{fixed(rate, 0)} requests/s on four H200 | {fixed(best['prelude-4u'], 0)} with long prompts" in readme
    assert f"**{pairs()} of SGLang's own prefill/decode pair**" in readme


def test_the_committed_sweeps_have_no_cliff():
    """By medians of nine repeats; the same measure finds the one of stock SGLang."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in ("matrix-sweep-repeats-cpu", "matrix-sweep-repeats-cpu-again"):
        for load in document(name)["loads"]:
            found[load["system"]][load["settings"]["num_adapters"]].append(load["summary"]["requests_per_s"])
    medians = {system: [median(rates) for rates in counts.values()] for system, counts in found.items()}
    share = {system: min(rates) / max(rates) for system, rates in medians.items()}
    assert share["unified"] >= 0.9
    assert share["none"] >= 0.9
    assert share["stock"] < 0.8
    assert f"pair {share['pair']:.2f}, unified worker {share['unified']:.2f}" in words_of("docs/evidence.md")


# ---- files ----------------------------------------------------------------------------------------------------------


def test_every_file_is_on_the_page_and_every_name_is_a_file():
    kept = {path.name for path in FILES}
    page = set(re.findall(r"`([\w.-]+\.json)`", (evidence.ROOT / "docs" / "evidence.md").read_text()))
    assert page == kept


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_names_its_machine_commit_and_command(path: Path):
    found = document(path.stem)
    assert found["hardware"]["cores"]
    assert found["hardware"]["gpu"]
    assert re.match(r"[0-9a-f]{7,40}(\+changes)?$", found["commit"])
    programs = r"prelude (bench [a-z-]+|doctor)|python -m bench\.\w+|sglang\.launch_server"
    assert re.match(rf"({programs}) ", found["command"] + " ")
