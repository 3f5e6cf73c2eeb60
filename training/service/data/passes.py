"""The data of a pass: checks it, and finds where answers begin (`answers.py`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from adapters.model.normal_form import Positions
from training.executor.losses import LOSSES
from training.executor.operations import Datum, Pass
from training.service import tinker_pb2 as pb
from training.service.data.answers import EarlierPasses, answers_of, check_learned
from training.service.data.rollouts import Answers, Find
from training.service.errors import Refused
from training.service.wire import check_no_unknown_field

_DTYPES: Mapping[int, type[np.generic]] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
_TARGETS, _ANSWER = "target_tokens", "answer"
_MAX_DATUMS = 1024
_MAX_INPUTS = 16  # of a datum
_MAX_CONTEXT_TOKENS = 8 * 1024**2  # of a pass, each answer's own; a datum may have very many answers


@dataclass(frozen=True, slots=True)
class DataLimits:
    vocabulary: int
    max_tokens: int  # of a datum with its last target


def pass_of(
    request: pb.ForwardBackwardRequest, positions: Positions, limits: DataLimits, earlier: EarlierPasses, sampled: Find
) -> Pass:
    """`sampled` finds what was sampled here. Raises Refused, which names the datum and the value."""
    if not 1 <= len(request.data) <= _MAX_DATUMS:
        raise Refused(f"data has {len(request.data)} datums; a pass has 1 to {_MAX_DATUMS}")
    check_no_unknown_field(request)
    for number, each in enumerate(request.data):  # before what takes time for each
        if max(len(each.model_input), len(each.loss_fn_input_spans), len(each.model_input_spans)) > limits.max_tokens:
            raise Refused(f"datum {number}: it has more chunks or spans than a sequence tokens, {limits.max_tokens}")
        if len(each.loss_fn_inputs) > _MAX_INPUTS:
            raise Refused(f"datum {number}: it has {len(each.loss_fn_inputs)} loss_fn_inputs; no loss takes so many")
    if (loss := LOSSES.get(request.loss_fn)) is None:
        raise Refused(f"loss_fn is {request.loss_fn[:40]!r}; {', '.join(LOSSES)} are computed")
    config = _config(request)
    for name, value in config.items():
        if name not in loss.defaults or not math.isfinite(value):
            known = ", ".join(loss.defaults) or "nothing"
            raise Refused(f"loss_fn_config has {name[:40]!r}: {value}; of {request.loss_fn}, {known} may be configured")
    data = []
    for number, datum in enumerate(request.data):
        try:
            data.append(_datum(datum, request, positions, limits, earlier, sampled))
        except Refused as error:
            raise Refused(f"datum {number}: {error}") from None
    num_read = sum(first + 1 for datum in data for first, _ in datum.answers)
    if num_read > _MAX_CONTEXT_TOKENS:
        raise Refused(f"the contexts of all answers have {num_read} tokens, over {_MAX_CONTEXT_TOKENS}; send less data")
    return Pass(request.loss_fn, config, tuple(data), request.forward_only)


def _config(request: pb.ForwardBackwardRequest) -> dict[str, float]:
    """The older map is read where the newer one is empty: clients write both."""
    if not request.loss_fn_config_v2:
        return dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        if value.WhichOneof("value") != "number":
            raise Refused(f"loss_fn_config has {name[:40]!r}: {value.text[:40]!r}; it must be a number")
    return {name: value.number for name, value in request.loss_fn_config_v2.items()}


def _datum(
    datum: pb.Datum,
    request: pb.ForwardBackwardRequest,
    positions: Positions,
    limits: DataLimits,
    earlier: EarlierPasses,
    sampled: Find,
) -> Datum:
    loss = LOSSES[request.loss_fn]
    tokens = _tokens(datum)
    given = {name: _tensor(name, tensor, len(tokens)) for name, tensor in datum.loss_fn_inputs.items()}
    if (targets := given.pop(_TARGETS, None)) is None:
        raise Refused(f"loss_fn_inputs has no {_TARGETS}")
    if targets.dtype != np.int64:
        raise Refused(f"{_TARGETS} is {targets.dtype}; token ids are int64")
    mask = given.pop(_ANSWER, None)
    if not 1 <= len(tokens) < limits.max_tokens:
        raise Refused(f"it has {len(tokens)} tokens and a last target; there are 2 to {limits.max_tokens} in all")
    for what, ids in (("model_input", tokens), (_TARGETS, targets)):
        if ids.min() < 0 or ids.max() >= limits.vocabulary:
            raise Refused(f"{what} has a token id outside of the vocabulary, 0 to {limits.vocabulary - 1}")
    if unknown := sorted(given.keys() - {*loss.inputs}):
        raise Refused(f"loss_fn_inputs has {unknown[0][:40]!r}; {request.loss_fn} takes {', '.join(loss.inputs)}")
    tokens, targets = tokens.astype(np.int32), targets.astype(np.int32)

    def sampled_of(sequence: np.ndarray) -> Answers:
        """If something is learned, without what merely equals a sample: an observation's inputs are all 0."""
        used, found = [given[name] for name in loss.inputs if name in given], sampled(sequence)
        return tuple(run for run in found if any(each[slice(*run)].any() for each in used)) or found

    weights = given.get(loss.weight)
    answers = answers_of(
        tokens,
        targets,
        positions,
        mask=mask,
        spans=datum.loss_fn_input_spans,
        weights=weights if request.loss_fn == "cross_entropy" else None,
        earlier=None if request.forward_only else earlier,
        sampled=sampled_of,
    )
    if request.loss_fn == "cross_entropy" and weights is None:
        given["weights"] = np.ones(len(targets))
    elif weights is not None:
        check_learned(answers, weights, loss.weight)
    inputs = {}
    for name in loss.inputs:
        if name not in given:
            raise Refused(f"loss_fn_inputs has no {name}, which {request.loss_fn} needs")
        inputs[name] = given[name].astype(np.float32)
        if not np.isfinite(inputs[name]).all():
            raise Refused(f"{name} has a value that is not finite")
    return Datum(tokens.tobytes(), targets.tobytes(), answers, {name: each.tobytes() for name, each in inputs.items()})


def _tokens(datum: pb.Datum) -> np.ndarray:
    parts = []
    for chunk in datum.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise Refused(f"model_input has a chunk of {kind or 'no kind'}; text is trained only: encoded_text")
        if len(chunk.encoded_text.tokens) % 4:
            raise Refused("encoded_text has a cut-off token: ids are int32")
        parts.append(np.frombuffer(chunk.encoded_text.tokens, "<i4"))
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _tensor(name: str, tensor: pb.Tensor, length: int) -> np.ndarray:
    """[length]"""
    dtype = _DTYPES.get(tensor.dtype)
    if tensor.WhichOneof("encoding") != "dense" or dtype is None:
        raise Refused(f"{name[:40]!r} is sparse or of another type; dense float32 and int64 are read")
    if len(tensor.dense) % np.dtype(dtype).itemsize:
        raise Refused(f"{name[:40]!r} has a cut-off value")
    values = np.frombuffer(tensor.dense, dtype)
    if len(values) != length or tensor.shape[:2] not in ([], [length]):
        shape = tensor.shape[:4] or [len(values)]
        raise Refused(f"{name[:40]!r} has the shape {shape}; it must have [{length}], one value for each token")
    return values
