"""Adapter residency: adapters fetched from the store, cached on disk, held in host memory for the engine."""

from prefill_worker.residency.acceptance import Acceptance
from prefill_worker.residency.residency import Residency

__all__ = ["Acceptance", "Residency"]
