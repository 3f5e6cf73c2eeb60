"""How answers in bfloat16 are held against the float32 reference.

Greedy tokens may part from the reference's where two are about as likely, so the engine's own tokens are given to the
reference, which says how likely it finds them. Tolerance: the mean difference of the log-probabilities of a
prompt, and of an answer, is at most 0.05, the largest 0.6, for the base model and every adapter alike.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from support.adapters.random_adapters import write_random_lora, write_random_mixed, write_random_reft
from support.engines.parity import Case
from support.engines.reference_answers import run_reference

from adapters.model.base_model import BaseModel

MEAN_TOLERANCE = 0.05
LARGEST_TOLERANCE = 0.6


def write_adapters(root: Path, model: Path) -> dict[str, Path]:
    """One of each kind, which changes answers by more than the tolerance."""
    base = BaseModel.read(model)
    return {
        "lora": write_random_lora(root / "lora", base, 1, std=0.2, dtype="bfloat16"),
        "direft": write_random_reft(root / "direft", base, 2, rank=8, std=2.0),
        "loreft": write_random_reft(root / "loreft", base, 3, kind="loreft", std=2.0),
        "mixed": write_random_mixed(root / "mixed", base, 4),
    }


def mean_distance(found: list[float], wanted: list[float]) -> float:
    return sum(abs(f - w) for f, w in zip(found, wanted, strict=True)) / len(found)


def cases_of(prompts: list[tuple[str | None, tuple[int, ...]]], new_tokens: int) -> list[Case]:
    """Requests whose answers are not known before."""
    return [Case(adapter, f"{len(ids)} tokens", ids, {"tokens": [0] * new_tokens}) for adapter, ids in prompts]


@dataclasses.dataclass(frozen=True)
class Judge:
    """The reference, for one model and its adapters."""

    model: Path
    directories: dict[str, Path]
    folder: Path  # to exchange files with the reference
    mean_tolerance: float = MEAN_TOLERANCE
    largest_tolerance: float = LARGEST_TOLERANCE

    def check(self, cases: list[Case], answers: list[dict]) -> list[Case]:
        """Every answer, with or without its prompt, is within tolerance; the cases with the reference's values."""
        known = self.references(cases, answers)
        worst: dict[str, tuple[float, float]] = {}
        for case, answer in zip(known, answers, strict=True):
            found = answer["choices"][0]["logprobs"]["token_logprobs"]
            num_answer = len(case.reference["logprobs"])
            pairs = [(found[-num_answer:], case.reference["logprobs"])]
            if len(found) > num_answer:
                pairs.append((found[1:-num_answer], case.reference["prompt_logprobs"][1:]))
            for part, wanted in pairs:  # each on its own: a long prompt would hide an answer
                own = [abs(f - w) for f, w in zip(part, wanted, strict=True)]
                mean, largest = sum(own) / len(own), max(own)
                name = case.adapter or "base"
                before = worst.get(name, (0.0, 0.0))
                worst[name] = (max(mean, before[0]), max(largest, before[1]))
                assert mean <= self.mean_tolerance, (case.name, mean)
                assert largest <= self.largest_tolerance, (case.name, largest)
        for name, (mean, largest) in worst.items():
            print(f"{name}: mean {mean:.4f}, largest {largest:.4f}")
        return known

    def distances(self, cases: list[Case], answers: list[dict]) -> Iterator[tuple[Case, dict[str | None, float]]]:
        """How far each answer is from the reference under every adapter: the cases have one prompt."""
        known = self.references(cases, answers)
        for case, answer in zip(cases, answers, strict=True):
            found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(case.prompt_ids)]
            yield case, {other.adapter: mean_distance(found, other.reference["prompt_logprobs"][1:]) for other in known}

    def references(self, cases: list[Case], answers: list[dict]) -> list[Case]:
        """The cases with the reference's values for these answers' tokens."""
        requests = [
            {
                "adapter": self.directories[case.adapter] if case.adapter else None,
                "prompt_ids": case.prompt_ids,
                "answer_ids": answer["choices"][0]["token_ids"],
            }
            for case, answer in zip(cases, answers, strict=True)
        ]
        found = run_reference(self.model, requests, self.folder)
        return [dataclasses.replace(case, reference=each) for case, each in zip(cases, found, strict=True)]
