"""The catalog, the store and the library that a cluster.yaml names."""

from __future__ import annotations

from adapters.base_model import BaseModel
from adapters.catalog.sql import SqlCatalog
from adapters.formats import Limits
from adapters.library import AdapterLibrary
from adapters.store import AdapterStore, S3Access, open_store
from cluster.config import ClusterConfig


def open_library(config: ClusterConfig) -> AdapterLibrary:
    """The library, its catalog's tables brought up to date. Raises AdapterError, and ValueError for a wrong URL."""
    assert config.catalog.url is not None
    return AdapterLibrary(
        catalog=SqlCatalog.open(config.catalog.url),
        store=open_configured_store(config),
        base=BaseModel.read(config.model.path),
        limits=limits_of(config),
        dtype=config.model.dtype,
    )


def open_configured_store(config: ClusterConfig) -> AdapterStore:
    """The store alone, which is all that workers need. Raises StoreUnavailable, and ValueError for a wrong URL."""
    assert config.store.url is not None
    access = S3Access(endpoint_url=config.store.s3_endpoint_url, region=config.store.s3_region)
    return open_store(config.store.url, access)


def limits_of(config: ClusterConfig) -> Limits:
    """What this deployment accepts of an adapter."""
    bounds = config.adapter_limits
    return Limits(max_rank=bounds.max_rank, max_bytes=bounds.max_bytes, target_modules=bounds.target_modules)
