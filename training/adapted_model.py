"""A transformers model with an adapter in training, attached to it by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Self

import torch
from torch.utils.checkpoint import checkpoint

from adapters.model.base_model import name_of_module
from training.attention import ATTENTION, attention_mask, register
from training.errors import AdapterUntrainable, DocumentInvalid
from training.scores import TargetScores, score_targets
from training.trainable.adapter import TrainableAdapter
from training.trainable.factors import TrainableLora, TrainableReft
from training.tree.rows import NONE, Row

# transformers passes unknown arguments on to every layer. So a layer that is computed again for the backward pass gets
# the tokens of its own row, whichever rows were read meanwhile.
_ARGUMENT = "prelude_base_only"


class AdaptedModel:
    """Reads rows under an adapter, as often as they are to be read: nothing drops out.

    The model's weights are frozen, its modules and its behaviour outside of this object stay as they are; `detach`, or
    the end of a `with`, undoes it.
    """

    def __init__(self, model: Any, adapter: TrainableAdapter, *, checkpointing: bool = False):
        """`model`: a causal language model of transformers. `checkpointing` keeps only each layer's input for the
        backward pass. Raises AdapterUntrainable if the adapter does not fit the model.
        """
        self.model = model
        self.adapter = adapter.to(model.device)
        self._checkpointing = checkpointing
        self._layers: list[Any] = list(model.model.layers)
        self._window = sliding_window(model)
        self._base_only: torch.Tensor | None = None  # tokens of the row that a layer reads; None: all
        targets = list(self._targets())  # before anything is changed
        self._handles: list[Any] = []
        self._restore: list[Callable[[], Any]] = []
        self._take_over()
        for layer in self._layers:
            self._handles.append(layer.register_forward_pre_hook(self._enter_layer, with_kwargs=True))
        for module, hook in targets:
            self._handles.append(module.register_forward_hook(hook))

    def detach(self) -> None:
        """Leave the model as it was. The adapter stays usable."""
        for handle in self._handles:
            handle.remove()
        for restore in self._restore:
            restore()
        self._handles, self._restore = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def score(self, row: Row) -> TargetScores:
        """The log-probabilities of a row's targets, without the logits of all its tokens in memory."""
        return score_targets(self.hidden(row), self.model.get_output_embeddings(), row.to(self.model.device))

    def score_base(self, row: Row) -> TargetScores:
        """The same without the adapter: what the base model makes of the row."""
        row = row.to(self.model.device)
        return score_targets(self._read(row), self.model.get_output_embeddings(), row)

    def hidden(self, row: Row) -> torch.Tensor:
        """Final hidden states [num_tokens, hidden] of a row."""
        row = row.to(self.model.device)
        is_base_only = row.branches != NONE  # answers
        if self.adapter.positions == "all":
            is_base_only = torch.zeros_like(is_base_only)
        return self._read(row, **{_ARGUMENT: is_base_only[:, None]})

    def _read(self, row: Row, **arguments: torch.Tensor) -> torch.Tensor:
        if self._window is not None and row.context_length > self._window:
            raise DocumentInvalid(
                f"the row has a context of {row.context_length} tokens, but the model attends to {self._window} only; "
                "train on shorter examples"
            )
        for layer in self._layers:
            layer.training = self._checkpointing and torch.is_grad_enabled()
        try:
            output = self.model.model(
                input_ids=row.tokens[None],
                position_ids=row.positions[None],
                attention_mask=attention_mask(row),
                use_cache=False,
                **arguments,
            )
        finally:
            for layer in self._layers:
                layer.training = False
        return output.last_hidden_state.flatten(0, 1)

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
            # `training` says at the time (`_read`); that of its modules stays off, which keeps dropout off.
            again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            for layer in self._layers:
                layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, again
                self._restore.append(partial(setattr, layer, "gradient_checkpointing", False))

    def _targets(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """(module, hook) for everything that the adapter changes."""
        modules = dict(self.model.named_modules())
        for layer, module, lora in self.adapter.lora():
            name = name_of_module(layer, module)
            target = modules.get(name)
            sizes = (getattr(target, "out_features", None), getattr(target, "in_features", None))
            if sizes != (lora.b.shape[0], lora.a.shape[1]):
                raise AdapterUntrainable(
                    f"the adapter changes {name} from {lora.a.shape[1]} to {lora.b.shape[0]} values; the model's "
                    f"has {sizes[1]} and {sizes[0]}: it is another model"
                )
            yield target, partial(self._after_projection, lora)
        for number, reft in self.adapter.reft():
            if number >= len(self._layers) or reft.hidden != self.model.config.hidden_size:
                raise AdapterUntrainable(
                    f"the adapter changes {reft.hidden} values after layer {number}; the model has "
                    f"{len(self._layers)} layers of {self.model.config.hidden_size}: it is another model"
                )
            yield self._layers[number], partial(self._after_layer, reft)

    def _enter_layer(self, _layer: Any, _inputs: Any, arguments: dict[str, Any]) -> None:
        self._base_only = arguments.get(_ARGUMENT)

    def _after_projection(
        self, lora: TrainableLora, _module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor
    ) -> torch.Tensor | None:
        if self._base_only is None:
            return None
        return lora.served(inputs[0].dtype).added(output, inputs[0], self._base_only)

    def _after_layer(self, reft: TrainableReft, _module: Any, _inputs: Any, output: Any) -> Any:
        if self._base_only is None:
            return None
        stream = output[0] if isinstance(output, tuple) else output
        stream = reft.served(stream.dtype).added(stream, stream, self._base_only)
        return (stream, *output[1:]) if isinstance(output, tuple) else stream


def sliding_window(model: Any) -> int | None:
    """How far back some layer attends; None: to everything."""
    config = model.config
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if types is None or "sliding_attention" in types else None
