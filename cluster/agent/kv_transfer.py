"""Which tensor parallel sizes of prefill and decode engines can exchange KV in one cluster (SGLang's NIXL backend)."""

from __future__ import annotations

from adapters.model.base_model import BaseModel
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError


def check_kv_transfers(config: ClusterConfig, base: BaseModel) -> None:
    """Raise ConfigError for sizes between which KV would be refused, or cut wrongly without an error.

    Each rank holds the KV of its heads. Between equal sizes rank n sends to rank n; else the larger size must be a
    multiple of the smaller one, so that a rank's heads go to, or come from, whole ranks. A prefill engine prepares such
    cuts once, for the first decode engine that needs them (`NixlKVManager.prep_handle_slice_src`), so the others must
    need the same.
    """
    sizes = {name: config.engine_of(name).tensor_parallel for name in config.workers}
    for prefill in config.workers_of("prefill"):
        first: tuple[int, str] | None = None
        for decode in config.workers_of("decode"):
            ours, theirs = sizes[prefill], sizes[decode]
            if ours == theirs:
                continue
            pair = f"worker {prefill} has tensor_parallel {ours}, and {decode} {theirs}"
            if max(ours, theirs) % min(ours, theirs):
                raise ConfigError(
                    f"{pair}: KV moves between them only if one size is a multiple of the other; change one"
                )
            cuts = theirs // ours // max(1, theirs // base.kv_heads) if theirs > ours else 1
            if first is not None and first[0] != cuts:
                raise ConfigError(
                    f"{pair}, which needs {_heads(cuts)}, but {first[1]} needs {_heads(first[0])}, and SGLang prepares "
                    "one for each prefill engine; give these decode workers the same tensor_parallel"
                )
            first = first or (cuts, decode)


def _heads(cuts: int) -> str:
    return f"each rank's heads cut in {cuts}" if cuts > 1 else "each rank's heads uncut"
