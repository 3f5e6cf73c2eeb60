"""Which tensor parallel sizes of prefill and decode engines can exchange KV in one cluster (SGLang's NIXL backend)."""

from adapters.model.base_model import BaseModel
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError


def check_kv_transfers(config: ClusterConfig, base: BaseModel) -> None:
    """Raise ConfigError for tensor parallel sizes between which KV would be refused, or split wrongly without an error.

    Each rank holds the KV of its heads. Between equal sizes, rank n sends to rank n. Otherwise the larger size must be
    a multiple of the smaller one, so that a rank's heads go to, or come from, whole ranks. A prefill engine prepares
    such a split once, for the first decode engine that needs one (`NixlKVManager.prep_handle_slice_src`), so all others
    must need the same split.
    """
    sizes = {name: config.engine_of(name).tensor_parallel for name in config.workers}
    for prefill in config.workers_of("prefill"):
        first: tuple[int, str] | None = None
        for decode in config.workers_of("decode"):
            pair = f"worker {prefill} has tensor_parallel {sizes[prefill]}, and {decode} {sizes[decode]}"
            try:
                cuts = cuts_between(sizes[prefill], sizes[decode], base)
            except ValueError as error:
                raise ConfigError(f"{pair}: {error}; change one") from error
            if cuts is None:
                continue
            if first is not None and first[0] != cuts:
                raise ConfigError(
                    f"{pair}, which needs {_heads(cuts)}, but {first[1]} needs {_heads(first[0])}, and SGLang prepares "
                    "one for each prefill engine; give these decode workers the same tensor_parallel"
                )
            first = first or (cuts, decode)


def cuts_between(prefill: int, decode: int, base: BaseModel) -> int | None:
    """Into how many parts a prefill rank's heads are split; None between equal sizes. Raises ValueError."""
    if prefill == decode:
        return None
    if max(prefill, decode) % min(prefill, decode):
        raise ValueError("KV moves between them only if one size is a multiple of the other")
    return decode // prefill // max(1, decode // base.kv_heads) if decode > prefill else 1


def _heads(cuts: int) -> str:
    return f"each rank's heads cut in {cuts}" if cuts > 1 else "each rank's heads uncut"
