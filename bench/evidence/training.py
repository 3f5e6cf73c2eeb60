"""Tables of training: shared prompts, peft, memory, learning rates over ranks."""

from __future__ import annotations

from typing import Any

from bench.evidence.cells import fixed, markdown, result

_H200 = result("training-h200-llama-3.1-8b.json")
_CPU = result("training-cpu.json")
_RANKS = result("rank-transfer.json")
_GIB = 1024**3
_READERS = {
    "shared": "DPO, shared prompts",
    "paired": "DPO, FlashAttention pairs",
    "sft": "SFT, prefill-only",
    "sft-peft": "SFT, peft",
}


def training_h200() -> str:
    ratio = "shared/paired"
    rows = [
        (line["profile"], _ratio(line), *_rates(line, "shared", "paired"), fixed(line[ratio], 2))
        for line in _lines(_H200.document, "dpo")
    ]
    head = ("DPO, lengths of", "prompt : answer", "shared, pairs/s", "FlashAttention pairs, pairs/s", "ratio")
    return markdown(head, rows)


def training_sft() -> str:
    rows = [
        (text, *_rates(line, "sft", "sft-peft"), fixed(line["sft/sft-peft"], 2))
        for text, file in (("H200, 8B", _H200), ("one CPU thread, small", _CPU))
        for line in _lines(file.document, "sft")
    ]
    return markdown(("SFT, LoRA rank 16", "prefill-only, tokens/s", "peft, all positions, tokens/s", "ratio"), rows)


def training_cpu() -> str:
    rows = [
        (
            line["profile"],
            _ratio(line),
            *_rates(line, "shared", "paired", "padded"),
            fixed(line["shared/paired"], 2),
            fixed(line["shared/padded"], 2),
        )
        for line in _lines(_CPU.document, "dpo")
    ]
    head = ("DPO, lengths of", "prompt : answer", "shared, pairs/s", "paired", "padded", "shared / paired", "/ padded")
    return markdown(head, rows)


def training_memory() -> str:
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    document = _H200.document
    for row in document["rows"]:
        is_long = row["profile"] == "long-row"
        size = document["settings"]["long_row" if is_long else "row_tokens"]
        found.setdefault((row["layout"], size), []).append(row)
    rows = [
        (
            _READERS[layout],
            f"{size:,}",
            f"{max(row['peak_bytes'] for row in several) / _GIB:.1f} GiB",
        )
        for (layout, size), several in sorted(found.items(), key=lambda item: item[0][::-1])
    ]
    return markdown(("8B's sizes, bfloat16", "tokens in a row", "most memory, weights included"), rows)


def rank_transfer() -> str:
    ranks = [str(rank) for rank in _RANKS.document["settings"]["ranks"]]
    rows = [
        (
            f"{line['kind']}, {'scaled' if line['is_scaled'] else 'one scale'}",
            *(_power(line["log2_rates"][rank]) if _has_learned(line, rank) else "not learned" for rank in ranks),
            "-" if line["octaves_apart"] is None else fixed(line["octaves_apart"], 1),
        )
        for line in _RANKS.document["best"]
    ]
    return markdown(("best learning rate", *(f"rank {rank}" for rank in ranks), "octaves apart"), rows)


def _has_learned(line: dict[str, Any], rank: str) -> bool:
    return line.get("learned", {}).get(rank, True)  # older results do not say


def _lines(document: dict[str, Any], loss: str) -> list[dict[str, Any]]:
    return sorted(
        (line for line in document["ratios"] if line["loss"] == loss), key=lambda line: line["prompt_to_answer"]
    )


def _ratio(line: dict[str, Any]) -> str:
    return fixed(line["prompt_to_answer"], 1)


def _rates(line: dict[str, Any], *layouts: str) -> list[str]:
    return [f"{line[layout]:,.0f}" if line[layout] >= 100 else fixed(line[layout], 2) for layout in layouts]


def _power(exponent: float) -> str:
    return f"{2**exponent:.2g}"
