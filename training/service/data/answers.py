"""Where the answers of a datum begin, which decides what is adapted: the adapter reads contexts, and no answer.

The protocol does not say it. In this order of trust: the tensor `answer`; provenance spans; what an earlier forward
pass of the same step said of the same tokens, because the backward pass of a custom loss has gradients for weights;
weights of 0 and one positive value; what was sampled here (`rollouts.py`). What remains is refused, never guessed.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from adapters.model.normal_form import Positions
from training.executor.operations import Operation, Pass, Step
from training.service import tinker_pb2 as pb
from training.service.data.rollouts import Answers, Find
from training.service.errors import Refused

_REMEMBERED = 8192  # data of a model


class EarlierPasses:
    """The answers of the forward passes of one model since its last step."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, tuple[int, Answers]] = OrderedDict()  # with the pass's number

    def note(self, seq: int, operation: Operation) -> None:
        """A step may arrive after the passes that follow it."""
        if isinstance(operation, Step):
            for key in [key for key, (noted, _) in self._answers.items() if noted < seq]:
                del self._answers[key]
        elif isinstance(operation, Pass) and operation.forward_only:
            for datum in operation.data:
                self._answers[_digest(datum.tokens, datum.targets)] = seq, datum.answers
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)

    def of(self, tokens: np.ndarray, targets: np.ndarray) -> Answers | None:
        found = self._answers.get(_digest(tokens.tobytes(), targets.tobytes()))
        return found and found[1]


def answers_of(
    tokens: np.ndarray,
    targets: np.ndarray,
    positions: Positions,
    *,
    mask: np.ndarray | None,
    spans: Sequence[pb.ProvenanceSpan],
    weights: np.ndarray | None,
    earlier: EarlierPasses | None,
    sampled: Find,
) -> Answers:
    """The runs of answer targets. tokens, targets: int32 [num_targets]. Raises Refused.

    None if all weights of a backward pass are 0, as of a conversation that was cut off before its answer.
    """
    if positions == "all":  # nothing to find: everything is adapted
        answers: Answers = ((0, len(targets)),)
    elif mask is not None:
        answers = _runs(_ones(mask, "answer"))
    elif spans:
        answers = _sampled(spans, len(targets))
    else:
        remembered = earlier and earlier.of(tokens, targets)
        by_weights = _marked(weights)
        if remembered and by_weights and by_weights != remembered and weights is not None and weights.max() == 1:
            raise Refused(
                "its weights of 0 and 1 mark another answer than the forward pass before it; send the tensor `answer`, "
                "or provenance spans"
            )
        answers = remembered or by_weights or sampled(np.append(tokens, targets[-1:]))
        if not answers and earlier is not None and weights is not None and not weights.any():
            return ()
    if not answers:
        raise Refused(
            "nothing says where its answer begins, and so what is adapted: send weights of 0 and 1, a tensor `answer` "
            "with 1 for the targets of answers, or provenance spans; or train on the very tokens of a prompt and its "
            "sample, not too long after this trainer has sampled them"
        )
    for first, end in answers:
        wrong = np.flatnonzero(tokens[first + 1 : end] != targets[first : end - 1])
        if len(wrong):
            at = first + int(wrong[0])
            raise Refused(f"target {at} of an answer is {targets[at]}, but the next token is {tokens[at + 1]}")
    return answers


def check_learned(answers: Answers, weights: np.ndarray, name: str) -> None:
    """Raise Refused if something outside of answers would be learned."""
    outside = weights != 0
    for first, end in answers:
        outside[first:end] = False
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise Refused(f"{name} is {weights[at]} at target {at}, outside of answers; it must be 0 there")


def _sampled(spans: Sequence[pb.ProvenanceSpan], num_targets: int) -> Answers:
    """A run for each sequence that was sampled: of two that follow each other, the first is context of the second."""
    answers: list[tuple[int, int]] = []
    at, before = 0, ("", -1)  # where the span before ended in its sequence
    for span in spans:
        kind = span.WhichOneof("span")
        one = getattr(span, kind) if kind else pb.SampledProvenanceSpan(length=-1)
        if not 0 <= one.length <= num_targets - at:
            raise Refused(f"loss_fn_input_spans cover other than its {num_targets} targets")
        if kind == "sampled_tokens" and one.length:
            first = answers.pop()[0] if (one.sequence_id, one.offset) == before else at
            answers.append((first, at + one.length))
        before = (one.sequence_id, one.offset + one.length) if kind == "sampled_tokens" else ("", -1)
        at += one.length
    if at != num_targets:
        raise Refused(f"loss_fn_input_spans cover {at} of its {num_targets} targets; they must cover all")
    return tuple(answers)


def _marked(weights: np.ndarray | None) -> Answers | None:
    """What weights of 0 and one positive value mark, such as 1 or, for a mean, 1 through the number of tokens."""
    if weights is None or not (highest := weights.max()) > 0 or not np.isin(weights, (0, highest)).all():
        return None
    return _runs(weights == highest)


def _ones(values: np.ndarray, name: str) -> np.ndarray:
    if not np.isin(values, (0, 1)).all():
        raise Refused(f"{name} has a value that is neither 0 nor 1")
    return values == 1


def _runs(is_answer: np.ndarray) -> Answers:
    """[first, end) of each run of True."""
    edges = np.flatnonzero(np.diff(is_answer.astype(np.int8), prepend=0, append=0))
    return tuple((int(first), int(end)) for first, end in edges.reshape(-1, 2))


def _digest(tokens: bytes, targets: bytes) -> bytes:
    return hashlib.blake2b(len(tokens).to_bytes(8, "little") + tokens + targets, digest_size=16).digest()
