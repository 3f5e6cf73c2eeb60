"""Opens the catalog, the store and the library of a cluster.yaml."""

from pathlib import Path

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.drivers import parse_url
from adapters.errors import CatalogUnavailable
from adapters.files.durable import make_folder
from adapters.files.work_folder import sweep_abandoned
from adapters.formats import Limits
from adapters.library import AdapterLibrary
from adapters.model.base_model import BaseModel
from adapters.packed.packing import Packer, pack_directory
from adapters.store import AdapterStore, S3Access, open_store
from adapters.store.signing import Signer
from cluster.config.schema import ClusterConfig
from cluster.integrity import signer_of


def open_library(
    config: ClusterConfig, catalog: SqlCatalog | None = None, packer: Packer = pack_directory
) -> AdapterLibrary:
    """Open the library, and the catalog if none is given. `packer`: of directories that are imported.

    Removes temporary files of killed imports, exports and uploads on this machine. Makes the key of a cluster on one
    machine. Raises as `open_configured_catalog`, AdapterError and ConfigError.
    """
    sweep_abandoned()
    signer = signer_of(config)
    return AdapterLibrary(
        catalog=catalog or open_configured_catalog(config),
        store=open_configured_store(config, signer),
        base=BaseModel.read(config.model.path),
        limits=limits_of(config),
        dtype=config.model.dtype,
        base_name=config.model.name,
        packer=packer,
    )


def open_configured_catalog(config: ClusterConfig) -> SqlCatalog:
    """Open the catalog alone: create the folder of a SQLite file, migrate the tables.

    Raises CatalogUnavailable, CatalogTooNew, and ValueError for a wrong URL.
    """
    assert config.catalog.url is not None
    url = parse_url(config.catalog.url)
    if url.get_backend_name() == "sqlite" and url.database:
        folder = Path(url.database).parent
        try:
            make_folder(folder)
        except OSError as error:
            raise CatalogUnavailable(
                f"the catalog's folder {folder} cannot be made ({error.strerror}); correct catalog.url, or make it"
            ) from error
    return SqlCatalog.open(config.catalog.url)


def open_configured_store(config: ClusterConfig, signer: Signer | None = None) -> AdapterStore:
    """Open the store alone, as routers and commands do; with a signer, to publish.

    Raises StoreUnavailable, and ValueError for a wrong URL.
    """
    return _open_store(config, config.store.s3_profile, signer)


def open_store_of_workers(config: ClusterConfig) -> AdapterStore:
    """Open the store with the credentials of workers, who only read. Raises as `open_configured_store`."""
    return _open_store(config, config.store.s3_worker_profile or config.store.s3_profile)


def _open_store(config: ClusterConfig, profile: str | None, signer: Signer | None = None) -> AdapterStore:
    assert config.store.url is not None
    access = S3Access(config.store.s3_endpoint_url, config.store.s3_region, profile=profile)
    return open_store(config.store.url, access, signer)


def limits_of(config: ClusterConfig) -> Limits:
    """The deployment's limits on adapters."""
    bounds = config.adapter_limits
    return Limits(
        bounds.max_rank,
        bounds.max_bytes,
        bounds.target_modules,
        bounds.max_expert_rank,
        serves_all_positions=bool(config.workers_of("unified")) or config.discovery.unified is not None,
    )
