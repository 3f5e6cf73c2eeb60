"""Every format in which adapters come, read into one normal form."""

from dataclasses import replace
from pathlib import Path

from adapters.errors import AdapterMalformed, AdapterUnsupported
from adapters.formats.folder import AdapterFolder, Limits
from adapters.formats.origin import FILES as ORIGIN_FILES
from adapters.formats.origin import warnings_of
from adapters.formats.peft.config import CONFIG_NAME as PEFT_CONFIG
from adapters.formats.peft.lora import WEIGHTS_STEM as PEFT_WEIGHTS
from adapters.formats.peft.lora import read_peft_lora
from adapters.formats.positions import GivenPositions, applied
from adapters.formats.prelude import CONFIG_NAME as PRELUDE_CONFIG
from adapters.formats.prelude import WEIGHTS_STEM as PRELUDE_WEIGHTS
from adapters.formats.prelude import read_prelude
from adapters.model.base_model import ATTENTION_MODULES, BaseModel
from adapters.model.normal_form import Adapter

__all__ = ["CONFIGS", "FILES", "Limits", "read_adapter"]

# The file that shows the format -> its reader.
_READERS = {PEFT_CONFIG: read_peft_lora, PRELUDE_CONFIG: read_prelude}
CONFIGS = tuple(_READERS)
# All that is read of a directory.
FILES = (*CONFIGS, f"{PEFT_WEIGHTS}.safetensors", f"{PRELUDE_WEIGHTS}.safetensors", *ORIGIN_FILES)


def read_adapter(directory: Path, base: BaseModel, limits: Limits, positions: GivenPositions | None = None) -> Adapter:
    """Read an adapter's directory, whatever format it is in, to be applied to `positions`; None: to its own.

    Raises a subclass of AdapterError, and nothing else.
    """
    folder = AdapterFolder(Path(directory), limits)
    found = [name for name in _READERS if name in folder.names]
    if len(found) > 1:
        raise AdapterMalformed(f"{folder.directory} has {' and '.join(found)}; an adapter has one of them")
    if not found:
        if any(name.startswith("intkey_") for name in folder.names):
            raise AdapterUnsupported(
                f"{folder.directory} is pyreft's, which does not say at which positions it was trained; save its W, R "
                "and b in Prelude's own layout (docs/adapter-formats.md)"
            )
        raise AdapterMalformed(
            f"{folder.directory} is no adapter: it has none of {', '.join(_READERS)}; docs/adapter-formats.md lists "
            "what is read"
        )
    warnings = warnings_of(folder, base)
    adapter = _READERS[found[0]](folder, base)
    _check_adapted(adapter, base)
    adapter = replace(adapter, warnings=(*adapter.warnings, *warnings))
    return applied(adapter, positions, serves_all_positions=limits.serves_all_positions)


def _check_adapted(adapter: Adapter, base: BaseModel) -> None:
    if not base.family.adapts_attention_only:
        return
    modules = {module for _, module in adapter.lora} - set(ATTENTION_MODULES)
    modules |= {f"experts.{module}" for _, _, module in adapter.experts}
    if modules:
        raise AdapterUnsupported(
            f"it has LoRA on {', '.join(sorted(modules))}, and engines adapt only attention in {base.architecture}: "
            f"train on {', '.join(ATTENTION_MODULES)}, or ReFT"
        )
