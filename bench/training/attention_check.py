"""FlexAttention against scaled-dot-product attention under the same mask, on a GPU: log-probabilities and gradients."""

from __future__ import annotations

import copy
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adapters.model.base_model import BaseModel
from bench.training.readers import FlashModel
from training.adapted_model import AdaptedModel
from training.trainable.adapter import TrainableAdapter
from training.trainable.spec import AdapterSpec, Kind
from training.tree.documents import Branch, Document
from training.tree.mask import boolean_mask
from training.tree.rows import Row

_VOCABULARY = 512
# Largest differences that pass, of log-probabilities and of gradients by their largest value.
TOLERANCES = {torch.float32: (2e-4, 1e-3), torch.bfloat16: (0.25, 0.1)}


class MaskedModel(AdaptedModel):
    """The path of CPUs: scaled-dot-product attention with a mask of bools."""

    def inputs(self, row: Row) -> dict[str, Any]:
        return {**super().inputs(row), "attention_mask": boolean_mask(row)}


@dataclass(frozen=True, slots=True)
class Case:
    """One model, adapter and way of computing."""

    kind: Kind = "lora"
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    is_flash: bool = False  # FlashAttention over documents of one answer, in place of FlexAttention


CASES = (
    Case(checkpointing=True),
    Case(head_dim=128, dtype=torch.bfloat16, checkpointing=True),
    Case(head_dim=128, dtype=torch.bfloat16, checkpointing=True, is_flash=True),
)
LENGTHS = (384,)  # a multiple of 128; others cost compilations


def check(
    cases: Sequence[Case], lengths: Sequence[int], progress: Callable[[str], None], device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """A line for each case and length: the largest differences, and what torch.compile did."""
    from torch._dynamo.utils import counters

    for case in cases:
        model, adapter = _model(case, device)
        other = copy.deepcopy(adapter)
        for number, length in enumerate(lengths):
            row = _row(length, number, case.is_flash)
            graphs = counters["stats"]["unique_graphs"]
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                begin = time.perf_counter()
                found = _read(FlashModel if case.is_flash else AdaptedModel, model, adapter, row, case)
                duration_s = time.perf_counter() - begin
            expected = _read(MaskedModel, model, other, row, case)
            most, most_gradient = TOLERANCES[case.dtype]
            logprobs = float((found[0] - expected[0]).abs().max())
            gradients = max(
                float((one - two).abs().max() / two.abs().max().clamp_min(1e-12))
                for one, two in zip(found[1], expected[1], strict=True)
            )
            line = {
                "attention": "flash" if case.is_flash else "flex",
                "kind": case.kind,
                "head_dim": case.head_dim,
                "dtype": str(case.dtype).removeprefix("torch."),
                "checkpointing": case.checkpointing,
                "row_tokens": row.num_tokens,
                "logprobs_differ_by": logprobs,
                "gradients_differ_by": gradients,
                "passes": logprobs <= most and gradients <= most_gradient,  # False for NaN, too
                "graphs_compiled": counters["stats"]["unique_graphs"] - graphs,
                "first_read_s": round(duration_s, 2),
                "warnings": sorted({str(each.message)[:160] for each in warned}),
            }
            progress(str(line))
            yield line


def _read(
    reader: type[AdaptedModel], model: Any, adapter: TrainableAdapter, row: Row, case: Case
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(log-probabilities, gradients of all parameters) of a row; weights differ, so that mixed-up tokens are seen."""
    adapted = reader(model, [adapter], case.checkpointing)
    try:
        scores = adapted.score(row).logprobs
        weights = torch.linspace(0.5, 1.5, len(scores), device=scores.device)
        (scores * weights).sum().backward()
        with torch.no_grad():  # as evaluations read, and as DPO reads its reference
            again = adapted.score(row).logprobs
    finally:
        adapted.detach()
    gradients = [parameter.grad for parameter in adapter.parameters()]
    for parameter in adapter.parameters():
        parameter.grad = None
    assert all(gradient is not None for gradient in gradients)
    return torch.cat([scores.detach(), again]), [each for each in gradients if each is not None]


def _model(case: Case, device: str) -> tuple[Any, TrainableAdapter]:
    """A model of three layers and an adapter that changes something."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=4 * case.head_dim,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=8 * case.head_dim,
        vocab_size=_VOCABULARY,
        max_position_embeddings=16384,
        initializer_range=0.06,
    )
    config.architectures = ["LlamaForCausalLM"]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(device, case.dtype)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        base = BaseModel.read(Path(folder))
    adapter = TrainableAdapter.create(AdapterSpec(case.kind, rank=8), base)
    for parameter in adapter.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model, adapter.to(device)


def _row(length: int, seed: int, has_single_answers: bool) -> Row:
    """Answers in the midst of their contexts, pairs and groups, up to nearly `length` tokens."""
    generator = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.choices(range(_VOCABULARY), k=count))

    documents: list[Document] = []
    free = length
    while free >= 96:
        trunk = tokens(generator.randint(4, min(free // 2, 300)))
        places = sorted(generator.randint(1, len(trunk)) for _ in range(generator.randint(0, 2)))
        places += [len(trunk)] * generator.randint(1, 3)
        if has_single_answers:
            places = places[-1:]
        most = max((free - len(trunk)) // len(places), 1)
        number = len(documents)
        branches = tuple(Branch(place, tokens(generator.randint(1, min(most, 64))), number) for place in places)
        documents.append(Document(trunk, branches))
        free -= documents[-1].num_tokens
    return Row.of(documents)
