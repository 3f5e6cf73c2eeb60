"""A transformers model with adapters in training, one slot each, attached to it by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adapters.model.base_model import name_of_module
from training.attention import ATTENTION, attention_mask, register
from training.errors import AdapterUntrainable, DocumentInvalid
from training.scores import TargetScores, score_targets
from training.slot_products import SlotTokens, add_low_rank
from training.trainable.adapter import TrainableAdapter
from training.trainable.factors import TrainableLora, TrainableReft
from training.tree.rows import Row

# transformers passes unknown arguments on to every layer. So a layer that is computed again for the backward pass gets
# the slots of its own row, whichever rows were read meanwhile.
_ARGUMENT = "prelude_slot_tokens"


def attach(model: Any, adapters: Sequence[TrainableAdapter], *, checkpointing: bool = False) -> AdaptedModel:
    """Attach adapters to a causal language model of transformers; a row's slot n is applied by adapters[n].

    The model's weights are frozen, its modules and its behaviour outside of `AdaptedModel` stay as they are; `detach`
    undoes it. `checkpointing` keeps only each layer's input for the backward pass. Raises AdapterUntrainable if an
    adapter does not fit the model.
    """
    return AdaptedModel(model, adapters, checkpointing)


class AdaptedModel:
    """Reads rows under their adapters. The model is in evaluation mode: nothing drops out."""

    def __init__(self, model: Any, adapters: Sequence[TrainableAdapter], checkpointing: bool = False):
        self.model = model
        self.adapters = nn.ModuleList(adapters).to(model.device)
        self._checkpointing = checkpointing
        self._layers: list[Any] = list(model.model.layers)
        self._window = sliding_window(model)
        self._tokens: SlotTokens | None = None  # of the row that the current layer reads
        targets = list(self._targets())  # before anything is changed
        self._handles: list[Any] = []
        self._restore: list[Callable[[], Any]] = []
        self._take_over()
        for layer in self._layers:
            self._handles.append(layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True))
        for module, hook in targets:
            self._handles.append(module.register_forward_hook(hook))
        for layer in self._layers:  # after the layer's ReFT, which is the last to need them
            self._handles.append(layer.register_forward_hook(self._leave_layer, always_call=True))

    def detach(self) -> None:
        """Leave the model as it was. The adapters stay usable."""
        for handle in self._handles:
            handle.remove()
        for restore in self._restore:
            restore()
        self._handles, self._restore = [], []

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the adapters, which are all that is trained."""
        return self.adapters.parameters()

    def forward(self, row: Row) -> torch.Tensor:
        """Logits [num_tokens, vocabulary] of a row, in the model's dtype."""
        return self.model.get_output_embeddings()(self.hidden(row))

    __call__ = forward

    def score(self, row: Row) -> TargetScores:
        """The log-probabilities of a row's targets, without the logits of all its tokens in memory."""
        return score_targets(self.hidden(row), self.model.get_output_embeddings(), row.to(self.model.device))

    def hidden(self, row: Row) -> torch.Tensor:
        """Final hidden states [num_tokens, hidden] of a row."""
        self._check(row)
        row = row.to(self.model.device)
        for layer in self._layers:
            layer.training = self._checkpointing and torch.is_grad_enabled()
        try:
            output = self.model.model(**self.inputs(row), use_cache=False, **{_ARGUMENT: SlotTokens.of(row)})
        finally:
            for layer in self._layers:
                layer.training = False
        return output.last_hidden_state.flatten(0, 1)

    def inputs(self, row: Row) -> dict[str, Any]:
        """What the model is called with for a row on its device: [1, num_tokens] ids and positions, and the mask."""
        return {
            "input_ids": row.tokens[None],
            "position_ids": row.positions[None],
            "attention_mask": attention_mask(row),
        }

    def _check(self, row: Row) -> None:
        for slot, positions in sorted(row.applied):
            if slot >= len(self.adapters):
                raise ValueError(
                    f"the row has tokens of slot {slot}; there are adapters for 0 to {len(self.adapters) - 1}"
                )
            adapter = self.adapters[slot]
            assert isinstance(adapter, TrainableAdapter)
            if adapter.positions != positions:
                raise ValueError(
                    f"the row applies slot {slot} to the positions {positions!r}, but its adapter is for "
                    f"{adapter.positions!r}; make documents with the adapter's positions"
                )
        if self._window is not None and row.context_length > self._window:
            raise DocumentInvalid(
                f"the row has a context of {row.context_length} tokens, but the model attends to {self._window} only; "
                "train on shorter examples"
            )

    def _take_over(self) -> None:
        """Freeze the model, switch its attention, and prepare its layers for checkpointing."""
        register()
        model, before = self.model, self.model.config._attn_implementation
        model.set_attn_implementation(ATTENTION)
        self._restore.append(lambda: model.set_attn_implementation(before))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._restore.append(partial(parameter.requires_grad_, True))
        for module in model.modules():
            if module.training:
                module.training = False
                self._restore.append(partial(setattr, module, "training", True))
        if self._checkpointing:
            # Not the model's own switch, which also wants gradients of the embeddings. A layer computes again what its
            # `training` says at the time (`hidden`); that of its modules stays off, which keeps dropout off.
            again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            for layer in self._layers:
                layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, again
                self._restore.append(partial(setattr, layer, "gradient_checkpointing", False))

    def _targets(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """(module, hook) for everything that some adapter changes."""
        lora: dict[str, dict[int, TrainableLora]] = {}
        reft: dict[int, dict[int, TrainableReft]] = {}
        for slot, adapter in enumerate(self.adapters):
            assert isinstance(adapter, TrainableAdapter)
            for layer, module, of_module in adapter.lora():
                lora.setdefault(name_of_module(layer, module), {})[slot] = of_module
            for layer, of_layer in adapter.reft():
                reft.setdefault(layer, {})[slot] = of_layer
        modules = dict(self.model.named_modules())
        for name, by_slot in lora.items():
            target, first = modules.get(name), next(iter(by_slot.values()))
            sizes = (getattr(target, "out_features", None), getattr(target, "in_features", None))
            if sizes != (first.b.shape[0], first.a.shape[1]):
                raise AdapterUntrainable(
                    f"the adapter changes {name} from {first.a.shape[1]} to {first.b.shape[0]} values; the model's "
                    f"has {sizes[1]} and {sizes[0]}: it is another model"
                )
            yield target, self._lora_hook(by_slot)
        for number, on_layer in reft.items():
            hidden = next(iter(on_layer.values())).hidden
            if number >= len(self._layers) or hidden != self.model.config.hidden_size:
                raise AdapterUntrainable(
                    f"the adapter changes {hidden} values after layer {number}; the model has "
                    f"{len(self._layers)} layers of {self.model.config.hidden_size}: it is another model"
                )
            yield self._layers[number], self._reft_hook(on_layer)

    def _enter_layer(self, _layer: Any, _inputs: Any, arguments: dict[str, Any]) -> None:
        self._tokens = arguments.get(_ARGUMENT)

    def _leave_layer(self, _layer: Any, _inputs: Any, _output: Any) -> None:
        self._tokens = None

    def _lora_hook(self, by_slot: dict[int, TrainableLora]) -> Callable[..., Any]:
        def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
            return self._adapted(by_slot, inputs[0], output)

        return add

    def _reft_hook(self, by_slot: dict[int, TrainableReft]) -> Callable[..., Any]:
        def add(_module: Any, _inputs: Any, output: Any) -> Any:
            if not isinstance(output, tuple):
                return self._adapted(by_slot, output, output)
            stream = self._adapted(by_slot, output[0], output[0])
            return output if stream is None else (stream, *output[1:])

        return add

    def _adapted(
        self, by_slot: dict[int, TrainableLora] | dict[int, TrainableReft], stream: torch.Tensor, to: torch.Tensor
    ) -> torch.Tensor | None:
        """`to` with the change of each token's adapter; None if no token has one."""
        if self._tokens is None or not (slots := self._tokens.present(sorted(by_slot))):
            return None
        factors = {slot: by_slot[slot].served(stream.dtype) for slot in slots}
        return add_low_rank(stream, to, self._tokens, factors)


def sliding_window(model: Any) -> int | None:
    """How far back some layer attends; None: to everything."""
    config = model.config
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if types is None or "sliding_attention" in types else None
