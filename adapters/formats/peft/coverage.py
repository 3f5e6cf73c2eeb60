"""Check that a PEFT configuration names the modules of its tensors, and no others.

The tensors say what the adapter changes. A list in the configuration must agree with them. Expressions, `all-linear`
and `exclude_modules` are not evaluated.
"""

from adapters.errors import AdapterIncompatible, AdapterMalformed, AdapterUnsupported
from adapters.formats.peft.config import CONFIG_NAME, PeftConfig
from adapters.formats.peft.names import ROUTER_REFUSED, Pair, endings, expert_projections
from adapters.model.base_model import FUSED_MODULES, MODULES, BaseModel, name_of_module

_EMBEDDINGS = ("embed_tokens", "lm_head")


def check_targets(config: PeftConfig, pairs: list[Pair], base: BaseModel) -> None:
    """Check a list of target_modules, and the layers that it is for; some layers may lack a module of the list.

    peft starts absent ones at zero, so leaving them out changes nothing. But a named module without any tensor shows
    that the file does not belong to the configuration.
    """
    if config.targets is None:
        return
    for entry in sorted(config.targets):
        last = entry.rpartition(".")[2]
        if last in _EMBEDDINGS:
            raise AdapterUnsupported(
                f"{CONFIG_NAME}: target_modules names {entry}; embeddings and the head are not served: train without "
                "them, in Tinker with train_unembed=False"
            )
        if last == "gate" and base.experts is not None:
            raise AdapterUnsupported(f"{CONFIG_NAME}: target_modules names {entry}: {ROUTER_REFUSED}")
    for pair in pairs:
        if config.targets.isdisjoint(endings(pair.key)):
            raise _not_named(pair, f"target_modules {', '.join(sorted(config.targets))[:120]}")
    covered = {ending for pair in pairs for ending in endings(pair.key)}
    parts = {name_of_module(pair.layer, part, base.layers_name) for pair in pairs for part in pair.parts}
    covered |= {ending for part in parts for ending in endings(part)}
    known = {*MODULES, *FUSED_MODULES, *expert_projections(base)}
    for entry in sorted(config.targets - covered):
        if entry.rpartition(".")[2] in known:
            raise _incomplete(entry)
    _check_layers(config.layers, [pair for pair in pairs if pair.key not in config.targets], base)


def _check_layers(layers: frozenset[int], pairs: list[Pair], base: BaseModel) -> None:
    """`pairs`: of modules that the configuration does not name in full."""
    if not layers:
        return
    if max(layers) >= base.num_layers:
        raise AdapterIncompatible(
            f"{CONFIG_NAME}: layers_to_transform names layer {max(layers)}, but the base model has {base.num_layers} "
            "layers"
        )
    for pair in pairs:
        if pair.layer not in layers:
            raise _not_named(pair, f"layers_to_transform {str(sorted(layers))[:120]}")
    if pairs and (absent := layers - {pair.layer for pair in pairs}):
        raise _incomplete(f"layer {min(absent)}")


def _not_named(pair: Pair, by: str) -> AdapterMalformed:
    return AdapterMalformed(
        f"there are tensors for {pair.key}, but {CONFIG_NAME} does not name it ({by}); peft would drop them, so "
        "correct the configuration"
    )


def _incomplete(entry: str) -> AdapterMalformed:
    return AdapterMalformed(
        f"{CONFIG_NAME}: target_modules names {entry}, but there are no tensors for it; the file is incomplete"
    )
