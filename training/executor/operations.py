"""What the log has of each command, and what the executor answers.

Commands are checked when they are accepted; what is in one of these can be computed, or fails for a reason that only
computing shows. They are msgpack in the log, so a field that is added needs a default.
"""

from typing import Any

import msgspec
import numpy as np

from adapters.model.normal_form import Positions
from training.trainable.spec import AdapterSpec, Kind


class Spec(msgspec.Struct, frozen=True, tag="create"):
    """A new adapter. The first command of a model."""

    rank: int
    seed: int
    modules: tuple[str, ...] | None = None  # None: all that workers serve
    positions: Positions = "prefill"
    adapter: str | None = None  # the name that it is pushed under
    kind: Kind = "lora"

    def of_adapter(self) -> AdapterSpec:
        """Raises AdapterUntrainable."""
        return AdapterSpec(self.kind, self.rank, positions=self.positions, modules=self.modules)


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The parameters of a checkpoint, and its moments if it is `whole`."""

    path: str
    folder: str  # below the service's folder
    whole: bool


class Datum(msgspec.Struct, frozen=True, array_like=True):
    """A sequence whose target i is the token after input i; the model is scored on the targets within `answers`."""

    tokens: bytes  # int32
    targets: bytes  # int32
    answers: tuple[tuple[int, int], ...]  # [first, end) of targets, ascending and apart
    inputs: dict[str, bytes]  # of the loss: float32, one for each target

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.tokens, np.int32).tolist())

    @property
    def target_ids(self) -> tuple[int, ...]:
        return tuple(np.frombuffer(self.targets, np.int32).tolist())

    def input(self, name: str) -> np.ndarray:
        """float32 [num_targets]"""
        return np.frombuffer(self.inputs[name], np.float32)


class Pass(msgspec.Struct, frozen=True, tag="pass"):
    """A loss, summed over all data, and its gradient unless it is `forward_only`."""

    loss: str
    config: dict[str, float]
    data: tuple[Datum, ...]
    forward_only: bool = False

    @property
    def num_tokens(self) -> int:
        """Of all sequences."""
        return sum(len(datum.tokens) for datum in self.data) // 4

    @property
    def num_answer_tokens(self) -> int:
        return sum(end - first for datum in self.data for first, end in datum.answers)


class Step(msgspec.Struct, frozen=True, tag="step"):
    """An update with AdamW from the gradients that have been summed since the last one."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    max_grad_norm: float  # 0: gradients are not clipped


class Save(msgspec.Struct, frozen=True, tag="save"):
    """A checkpoint to continue from."""

    path: str
    folder: str
    expires_s: float | None = None  # by the clock


class Export(msgspec.Struct, frozen=True, tag="export"):
    """The adapter for workers that sample with it."""

    path: str | None = None  # of the checkpoint that it becomes; None: it is for one sampling session
    sampler: str | None = None  # id of that session
    expires_s: float | None = None  # as of a Save


Operation = Spec | Load | Pass | Step | Save | Export


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The command has changed nothing. `is_users`: the caller can put it right."""

    message: str
    is_users: bool = True


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    """Of a pass."""

    loss_sum: float
    logprobs: tuple[bytes, ...]  # float32, one for each target of each datum; 0 outside of answers


class Done(msgspec.Struct, frozen=True, tag="done"):
    """Of every other command."""

    values: dict[str, Any] = {}


Outcome = Failure | Scored | Done

_operations, _outcomes = msgspec.msgpack.Decoder(Operation), msgspec.msgpack.Decoder(Outcome)
encode = msgspec.msgpack.encode


def decode_operation(raw: bytes) -> Operation:
    return _operations.decode(raw)


def decode_outcome(raw: bytes) -> Outcome:
    return _outcomes.decode(raw)
