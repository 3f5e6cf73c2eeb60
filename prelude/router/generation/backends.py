"""The dependencies that all requests of one router share."""

from __future__ import annotations

from dataclasses import dataclass

from prelude.cluster.config.router import RouterConfig
from prelude.process.tracing.span import Tracing
from prelude.router.fleet.fleet import Fleet
from prelude.router.generation.engine_calls import Engines
from prelude.router.generation.request import Requests
from prelude.router.identity.audit import AuditLog
from prelude.router.metrics import Metrics
from prelude.router.placement.placer import Placer
from prelude.router.placement.request import PromptMeter
from prelude.router.protocol.field_values import Limits
from prelude.router.protocol.request_body import BodyBudget
from prelude.router.quotas.quotas import Quotas
from prelude.router.revisions.adapter_service import AdapterService


@dataclass(frozen=True, slots=True)
class Backends:
    """What a request meets: configuration, workers and engines, adapters, and what counts and records it."""

    config: RouterConfig
    model: str  # the name that engines know the base model by
    fingerprint: str  # of the base model
    limits: Limits  # of requests' fields
    fleet: Fleet
    engines: Engines
    placer: Placer
    prompts: PromptMeter
    adapters: AdapterService
    quotas: Quotas
    requests: Requests  # in flight
    bodies: BodyBudget  # in flight
    audit: AuditLog
    metrics: Metrics
    tracing: Tracing
