"""A transformers model with an adapter in training, attached to it by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from adapters.model.base_model import name_of_module
from training.attention import ATTENTION, attention_mask, register
from training.errors import AdapterUntrainable, DocumentInvalid
from training.scores import TargetScores, score_targets
from training.trainable.adapter import TrainableAdapter
from training.trainable.factors import ServedFactors, TrainableLora, TrainableReft
from training.tree.rows import Row

# transformers passes unknown arguments on to every layer. So a layer that is computed again for the backward pass gets
# the tokens of its own row, whichever rows were read meanwhile.
_ARGUMENT = "prelude_base_tokens"


def attach(model: Any, adapter: TrainableAdapter | None, *, checkpointing: bool = False) -> AdaptedModel:
    """Attach an adapter to a causal language model of transformers; None: rows are read by the base model.

    The model's weights are frozen, its modules and its behaviour outside of `AdaptedModel` stay as they are; `detach`
    undoes it. `checkpointing` keeps only each layer's input for the backward pass. Raises AdapterUntrainable if the
    adapter does not fit the model.
    """
    return AdaptedModel(model, adapter, checkpointing)


class AdaptedModel:
    """Reads rows under the adapter. The model is in evaluation mode: nothing drops out."""

    def __init__(self, model: Any, adapter: TrainableAdapter | None, checkpointing: bool = False):
        self.model = model
        self.adapter = None if adapter is None else adapter.to(model.device)
        self._checkpointing = checkpointing
        self._layers: list[Any] = list(model.model.layers)
        self._window = sliding_window(model)
        self._base_tokens: torch.Tensor | None = None  # of the row that the current layer reads; None: all of them
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
        """Leave the model as it was. The adapter stays usable."""
        for handle in self._handles:
            handle.remove()
        for restore in self._restore:
            restore()
        self._handles, self._restore = [], []

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the adapter, which is all that is trained."""
        return iter(()) if self.adapter is None else self.adapter.parameters()

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
            base_tokens = ~row.adapted[:, None] if row.applied else None
            output = self.model.model(**self.inputs(row), use_cache=False, **{_ARGUMENT: base_tokens})
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
        own = None if self.adapter is None else self.adapter.positions
        for positions in row.applied:
            if positions != own:
                raise ValueError(
                    f"the row applies an adapter to the positions {positions!r}, but the model's is for {own!r}; make "
                    "documents with the adapter's positions"
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
        """(module, hook) for everything that the adapter changes."""
        if self.adapter is None:
            return
        modules = dict(self.model.named_modules())
        for layer, module, lora in self.adapter.lora():
            name = name_of_module(layer, module)
            target, wanted = modules.get(name), (lora.a.shape[1], lora.b.shape[0])
            found = (getattr(target, "in_features", None), getattr(target, "out_features", None))
            if found != wanted:
                raise AdapterUntrainable(
                    f"the adapter changes {name} from {wanted[0]} to {wanted[1]} values; the model's has {found[0]} "
                    f"and {found[1]}: it is another model"
                )
            yield target, self._lora_hook(lora)
        for layer, reft in self.adapter.reft():
            if layer >= len(self._layers) or reft.hidden != self.model.config.hidden_size:
                raise AdapterUntrainable(
                    f"the adapter changes {reft.hidden} values after layer {layer}; the model has "
                    f"{len(self._layers)} layers of {self.model.config.hidden_size}: it is another model"
                )
            yield self._layers[layer], self._reft_hook(reft)

    def _enter_layer(self, _layer: Any, _inputs: Any, arguments: dict[str, Any]) -> None:
        self._base_tokens = arguments.get(_ARGUMENT)

    def _leave_layer(self, _layer: Any, _inputs: Any, _output: Any) -> None:
        self._base_tokens = None

    def _lora_hook(self, lora: TrainableLora) -> Callable[..., Any]:
        def add(_module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            return self._adapted(lora, inputs[0], output)

        return add

    def _reft_hook(self, reft: TrainableReft) -> Callable[..., Any]:
        def add(_module: Any, _inputs: Any, output: Any) -> Any:
            if not isinstance(output, tuple):
                return self._adapted(reft, output, output)
            return (self._adapted(reft, output[0], output[0]), *output[1:])

        return add

    def _adapted(self, of: TrainableLora | TrainableReft, stream: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        """`to` with the adapter's change of each token that it is applied to."""
        if self._base_tokens is None:
            return to
        return add_low_rank(stream, to, self._base_tokens, of.served(stream.dtype))


def add_low_rank(
    stream: torch.Tensor, to: torch.Tensor, base_tokens: torch.Tensor, factors: ServedFactors
) -> torch.Tensor:
    """`to` [..., out] with B^T (A x + b) added, x from `stream` [..., in]; nothing where `base_tokens` [tokens, 1].

    A product over all tokens: gathering those that are adapted would move more memory than it saves arithmetic.
    """
    inner = stream.reshape(-1, stream.shape[-1]) @ factors.a.T
    if factors.bias is not None:
        inner = inner + factors.bias
    inner = inner.masked_fill(base_tokens, 0.0)
    return torch.addmm(to.reshape(-1, to.shape[-1]), inner, factors.b).view(to.shape)


def sliding_window(model: Any) -> int | None:
    """How far back some layer attends; None: to everything."""
    config = model.config
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if types is None or "sliding_attention" in types else None
