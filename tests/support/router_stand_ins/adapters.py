"""The model that stand-ins pretend to serve, and real, small adapters for it."""

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from support.adapters.random_adapters import write_random_lora

from adapters.catalog.sql import SqlCatalog
from adapters.formats import Limits as AdapterLimits
from adapters.formats import read_adapter
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.model.manifest import revision_id_of
from adapters.store import open_store
from cluster.config.schema import AdapterConfig
from router.metrics import Metrics
from router.revisions.adapter_service import AdapterService

MODEL = "base"
FINGERPRINT = "f00d"
VOCABULARY = 1000

LIMITS = AdapterLimits(max_rank=16, max_bytes=4 * 1024**2)
_TINY = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY,
}  # fmt: skip


def _make_template() -> Path:
    """A base model's configuration, and adapters: a valid one, one for all positions, a damaged one."""
    folder = Path(tempfile.mkdtemp(prefix="prelude-router-tests-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(_TINY))
    base = BaseModel.read(folder)
    write_random_lora(folder / "a0", base, seed=0)
    write_random_lora(folder / "everywhere", base, seed=1, config={"prelude": {"positions": "all"}})
    weights = write_random_lora(folder / "broken", base, seed=2) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    catalog = SqlCatalog.open(f"sqlite:///{folder / 'catalog.db'}")
    catalog.close()
    return folder


TEMPLATE = _make_template()
BASE = BaseModel.read(TEMPLATE)
REVISION_ID = revision_id_of(read_adapter(TEMPLATE / "a0", BASE, LIMITS))
EVERYWHERE_ID = revision_id_of(read_adapter(TEMPLATE / "everywhere", BASE, LIMITS))
DIRECTORIES = {name: TEMPLATE / name for name in ("a0", "everywhere", "broken")}  # of "cluster.yaml"


def library_over(catalog: SqlCatalog, folder: Path) -> AdapterLibrary:
    """A library whose store is in a folder."""
    return AdapterLibrary(catalog, open_store(f"file://{folder / 'store'}"), BASE, LIMITS, "float32")


def configured(directories: Mapping[str, Path | AdapterConfig]) -> dict[str, AdapterConfig]:
    """The section `adapters` of a cluster.yaml."""
    return {n: AdapterConfig(path=each) if isinstance(each, Path) else each for n, each in directories.items()}


def managed_adapters(
    folder: Path, metrics: Metrics | None = None, *, catalog_url: str | None = None, **directories: Path | AdapterConfig
) -> AdapterService:
    """An AdapterService, not opened yet, whose catalog and store are in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if catalog_url is None:
        if not (folder / "catalog.db").exists():
            shutil.copy(TEMPLATE / "catalog.db", folder)  # a migrated one, because a migration takes a while
        catalog_url = f"sqlite:///{folder / 'catalog.db'}"
    return AdapterService(
        lambda: SqlCatalog.open(catalog_url),
        lambda catalog: library_over(catalog, folder),
        configured(directories),
        metrics or Metrics(),
    )
