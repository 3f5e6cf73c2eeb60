"""Limits of the deployment that apply to every format."""

from collections.abc import Iterable

from adapters.errors import AdapterIncompatible
from adapters.formats.folder import AdapterFolder


def check_modules(modules: Iterable[str], folder: AdapterFolder) -> None:
    """Raise AdapterIncompatible for a projection that this deployment does not adapt."""
    for module in modules:
        if module not in folder.limits.target_modules:
            raise AdapterIncompatible(
                f"the adapter changes {module}, but this deployment adapts {', '.join(folder.limits.target_modules)}; "
                "add it to adapter_limits.target_modules"
            )


def check_rank(rank: int, where: str, folder: AdapterFolder) -> None:
    """Raise AdapterIncompatible for a rank above the deployment's limit."""
    if rank > folder.limits.max_rank:
        raise AdapterIncompatible(
            f"{where} has rank {rank}, over this deployment's limit of {folder.limits.max_rank}; "
            "train with a lower rank or raise adapter_limits.max_rank"
        )


def common_dtype(*dtypes: str) -> str:
    """The narrowest dtype that holds the values of all of them exactly."""
    return dtypes[0] if len(set(dtypes)) == 1 else "float32"
