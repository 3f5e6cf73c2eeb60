"""Check that a PEFT file has the tensors that its configuration describes, and no others."""

from __future__ import annotations

from collections.abc import Iterator

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.peft.config import PeftConfig
from adapters.formats.peft.names import ROUTER_REFUSED, Named, expert_key, router_names
from adapters.formats.peft.targets import ALL_LINEAR, Targets, endings, names
from adapters.model.base_model import MLP_MODULES, BaseModel, name_of_module

_EMBEDDINGS = ("model.embed_tokens", "lm_head")


def check_targets(config: PeftConfig, named: Named, base: BaseModel) -> None:
    """Check that tensors and configuration name the same modules; some layers may lack a module that is named on all.

    peft starts absent ones at zero, so leaving them out changes nothing. But a named module without any tensor shows
    that the file does not belong to the configuration.
    """
    targets = config.targets
    pairs = named.pairs + named.expert_pairs
    keys = {pair.key for pair in pairs}
    if targets.modules != ALL_LINEAR:
        for name in _EMBEDDINGS:
            if _names_one(targets, name):
                raise AdapterUnsupported(
                    f"{targets.where}: target_modules names {name}; embeddings and the head are not served"
                )
        for name in router_names(base):
            if not name.endswith(".weight") and _names_one(targets, name):
                raise AdapterUnsupported(f"{targets.where}: target_modules names {name}: {ROUTER_REFUSED}")
    for key in sorted(keys):
        if not targets.match(key):
            raise AdapterMalformed(
                f"there are tensors for {key}, but {targets.where} does not name it (target_modules "
                f"{str(targets.modules)[:120]}); peft would drop them, so correct the configuration"
            )
    covered = keys | {name_of_module(pair.layer, part) for pair in named.pairs for part in pair.parts}
    for entry, wanted in _wanted(config, base):
        if wanted and wanted.isdisjoint(covered):
            raise AdapterMalformed(
                f"{targets.where}: target_modules names {entry}, but there are no tensors for it; the file is "
                "incomplete"
            )


def _names_one(targets: Targets, name: str) -> bool:
    if isinstance(targets.modules, str):
        return targets.match(name)
    return any(names(entry, name) for entry in targets.modules) and not targets.excludes(name)


def _wanted(config: PeftConfig, base: BaseModel) -> Iterator[tuple[str, set[str]]]:
    """Yield (an entry of the configuration, the modules of the base model that it names)."""
    targets = config.targets
    by_layer: dict[int, set[str]] = {}
    by_name: dict[str, set[str]] = {}  # by an ending of the modules' names
    for layer in range(base.num_layers):
        for key in _keys_of(layer, base):
            if targets.match(key):
                by_layer.setdefault(layer, set()).add(key)
                if isinstance(targets.modules, str):
                    by_name.setdefault(key.rpartition(".")[2], set()).add(key)
                for entry in targets.entries.intersection(endings(key)):
                    by_name.setdefault(entry, set()).add(key)
    yield from by_name.items()
    for layer in targets.layers:
        if layer >= base.num_layers:
            raise AdapterIncompatible(
                f"{targets.where}: layers_to_transform names layer {layer}, but the base model has {base.num_layers} "
                "layers"
            )
        yield f"layer {layer}", by_layer.get(layer, set())


def _keys_of(layer: int, base: BaseModel) -> Iterator[str]:
    """peft's names of a layer's projections that can be adapted individually."""
    for module in base.modules_of(layer):
        yield name_of_module(layer, module)
    if base.experts is not None and base.has_experts(layer):
        for expert in range(base.experts.count):
            for module in MLP_MODULES:
                yield expert_key(base, layer, expert, module)
