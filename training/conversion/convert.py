"""Converts an adapter for all positions into one for the prompt only.

The teacher, applied at all positions, answers the user's prompts greedily. The student, applied to the prompt only, is
trained to predict every token of these answers as the teacher does, over the whole vocabulary.
"""

import hashlib
import io
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from adapters.model.manifest import revision_id_of
from adapters.model.normal_form import Adapter, Positions
from training.adapted_model import sliding_window
from training.conversion.report import Measure, Report
from training.conversion.steps import Steps, Taught, train
from training.data.examples import Example, Examples
from training.data.tokens import Turn
from training.errors import CheckpointNotWritten, DataInvalid, OptionInvalid
from training.loop.batches import Batches
from training.loop.progress import Count
from training.loop.whole_folder import replace_folder
from training.runs.answers import Question, answers, expected_states
from training.runs.base import LoadedBase
from training.trainable.adapter import TrainableAdapter
from training.trainable.files import write_adapter
from training.trainable.spec import AdapterSpec
from training.tree.rows import ROW_MULTIPLE

REPORT = "conversion.json"
_MIN_PROMPTS = 10
_HELD_OUT = 0.2  # of the prompts
_MOST_HELD_OUT = 200


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """How the student is made. Raises OptionInvalid."""

    rank: int | None = None  # None: the teacher's
    learning_rate: float = 1e-3
    num_steps: int = 200
    batch_size: int = 16  # prompts a step
    answer_tokens: int = 128  # most tokens of an answer
    row_tokens: int = 1024  # read at once, at least: a device that is faster than its launches reads more
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rank", "num_steps", "batch_size", "answer_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionInvalid(f"{name.replace('num_', '').replace('_', ' ')} is {value}; it must be at least 1")
        if not 0 < self.learning_rate < math.inf:
            raise OptionInvalid(f"the learning rate is {self.learning_rate:g}; it must be positive and finite")
        if not 0 <= self.seed < 2**63:
            raise OptionInvalid(f"the seed is {self.seed}; it is from 0 to {2**63 - 1}")


@dataclass(frozen=True, slots=True)
class Converted:
    """The student and what is known of it."""

    adapter: TrainableAdapter
    report: Report

    def write(self, folder: Path, base_name: str, *, with_adapter: bool = True) -> None:
        """Write the report, and the adapter with its lineage, to a new folder. Raises CheckpointNotWritten."""
        report = self.report
        lineage = {"from": report.teacher, "data": report.data, "agreement": report.after.agreement}

        def write(into: Path) -> None:
            (into / REPORT).write_text(json.dumps(asdict(report), indent=1))
            if with_adapter:
                write_adapter(self.adapter, into, base_name, lineage)

        try:
            replace_folder(folder, write)
        except OSError as error:
            raise CheckpointNotWritten(f"{folder} cannot be written ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class _Prompt:
    where: str
    context: tuple[int, ...]
    wanted: tuple[int, ...]  # the row's own answer; empty: none


def convert(
    base: LoadedBase,
    teacher: Adapter,
    prompts: Examples,
    options: ConversionOptions,
    *,
    held_out: Examples | None = None,
    teacher_id: str | None = None,
    told: TextIO | None = None,
) -> Converted:
    """Teach an adapter for all positions to live in the prompt. `held_out`: None takes a fifth of the prompts.

    `teacher_id` is the revision that it comes from, if that is another. `told` gets progress.
    Raises OptionInvalid, DataInvalid, LossNotFinite and MemoryExceeded.
    """
    began, told = time.monotonic(), told or io.StringIO()
    check_teacher(teacher)
    learned, apart = _split(prompts, held_out)
    _check_lengths(base, (*learned, *apart), options.answer_tokens)
    student = _student(base, teacher, options)
    asked = [*learned, *apart]
    given = _answers(base, teacher, "all", asked, options.answer_tokens, "the teacher's answers", told)
    questions = [Question(each.context, len(tokens), tokens) for each, tokens in zip(asked, given, strict=True)]
    states = expected_states(base.model, teacher, questions, "all")
    own, others = slice(len(learned)), slice(len(learned), None)
    measure = Measure(base, questions[others], states[others], [each.wanted for each in apart])
    before = measure.fidelity(teacher, "prefill")
    print(f"before: {before.agreement:.3f} of the held-out answers are the teacher's", file=told, flush=True)

    taught, held = (
        _taught(base, asked[part], questions[part], states[part], options.row_tokens) for part in (own, others)
    )
    steps = Steps(options.num_steps, options.batch_size, options.learning_rate, options.seed)
    outcome = train(base.model, student, taught, held, steps, told)
    after = measure.fidelity(student.normal_form(), "prefill")
    report = Report(
        teacher=teacher_id or revision_id_of(teacher),
        data=_digest(asked),
        num_prompts=len(learned),
        num_held_out=len(apart),
        rank=student.spec.rank,
        learning_rate=options.learning_rate,
        num_steps=outcome.num_steps,
        best_step=outcome.best_step,
        seconds=round(time.monotonic() - began, 1),
        teacher_exact_match=measure.exact_match(given[others]),
        before=before,
        after=after,
    )
    return Converted(student, report)


def check_teacher(teacher: Adapter) -> None:
    """Raises OptionInvalid for an adapter that need not, or cannot, be converted."""
    if teacher.positions == "prefill" and teacher.trained_positions != "all":
        raise OptionInvalid(
            "the adapter is applied to the prompt only already; import it as it is. An adapter that was trained for "
            "all positions says so (docs/adapter-formats.md)"
        )


def _student(base: LoadedBase, teacher: Adapter, options: ConversionOptions) -> TrainableAdapter:
    """A LoRA with the teacher's weights where that is one, too, else fresh."""
    begins = not teacher.experts and teacher.kinds == ("lora",)
    rank = options.rank or teacher.max_rank
    if begins and rank < teacher.max_rank:
        raise OptionInvalid(f"the rank is {rank}; the teacher's is {teacher.max_rank}, and the student begins there")
    spec = AdapterSpec("lora", rank, positions="prefill")
    student = TrainableAdapter.create(spec, base.sizes, seed=options.seed)
    if begins:
        student.begin_as(teacher)
    return student


def _split(prompts: Examples, held_out: Examples | None) -> tuple[list[_Prompt], list[_Prompt]]:
    """(to learn from, held out), no prompt twice. Raises DataInvalid."""
    all_of_them = list(_prompts(prompts))
    if held_out is None:
        count = min(math.ceil(_HELD_OUT * len(all_of_them)), _MOST_HELD_OUT)
        apart = sorted(all_of_them, key=lambda each: _digest([each]))[:count]
    else:
        apart = list(_prompts(held_out))
    contexts = {each.context for each in apart}
    learned = [each for each in all_of_them if each.context not in contexts]
    if len(learned) < _MIN_PROMPTS:
        fault = f"{len(learned)} different prompts to learn from, {len(apart)} held out; give a few hundred, at least "
        raise DataInvalid([f"{fault}{_MIN_PROMPTS} of the former"], len(prompts))
    return learned, apart


def _prompts(examples: Examples) -> Iterator[_Prompt]:
    seen: set[tuple[int, ...]] = set()
    for example in examples.examples:
        for turn in example.turns:
            context = tuple(turn.context)
            if context not in seen:
                seen.add(context)
                yield _Prompt(example.where, context, tuple(turn.answers[0]) if turn.answers else ())


def _check_lengths(base: LoadedBase, prompts: Sequence[_Prompt], answer_tokens: int) -> None:
    limits = [each for each in (base.sizes.context_length, sliding_window(base.model)) if each]
    for prompt in prompts:
        if limits and len(prompt.context) + answer_tokens > min(limits):
            raise OptionInvalid(
                f"{prompt.where}: a prompt of {len(prompt.context)} tokens, with an answer of up to {answer_tokens}; "
                f"the model reads {min(limits)}. Choose fewer --answer-tokens, or leave the row out"
            )


def _answers(
    base: LoadedBase,
    adapter: Adapter,
    positions: Positions,
    prompts: Sequence[_Prompt],
    num_tokens: int,
    name: str,
    told: TextIO,
) -> list[list[int]]:
    count, found = Count(name, len(prompts), "prompt", told), {}
    questions = [Question(each.context, num_tokens) for each in prompts]
    for number, answer in answers(base.model, adapter, questions, base.ends | {base.tokenizer.eos_token_id}, positions):
        found[number] = answer.tokens
        count.add()
    count.close()
    return [found[number] for number in range(len(prompts))]


def _taught(
    base: LoadedBase,
    prompts: Sequence[_Prompt],
    questions: Sequence[Question],
    states: Sequence[torch.Tensor],
    row_tokens: int,
) -> Taught:
    examples = [
        Example(prompt.where, (Turn(prompt.context, (tuple(question.expected),)),))
        for prompt, question in zip(prompts, questions, strict=True)
    ]
    longest = max(len(each.context) + len(each.expected) for each in questions)
    row_tokens = max(row_tokens, longest + -longest % ROW_MULTIPLE)
    fixed = base.model.dtype != torch.float32  # kernels in 16 bits round by the length
    return Taught(Batches(examples, row_tokens, fixed_rows=fixed), states)


def _digest(prompts: Sequence[_Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(np.array([len(prompt.context), *prompt.context], dtype="<i8").tobytes())
    return digest.hexdigest()
