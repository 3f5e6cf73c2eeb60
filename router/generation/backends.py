"""The dependencies that all requests of one router share."""

from dataclasses import dataclass

from cluster.config.router import RouterConfig
from process.tracing.span import Tracing
from router.fleet.fleet import Fleet
from router.generation.engine_calls import Engines
from router.generation.request import Requests
from router.identity.audit import AuditLog
from router.metrics import Metrics
from router.placement.placer import Placer
from router.placement.request import PromptMeter
from router.protocol.field_values import Limits
from router.protocol.request_body import BodyBudget
from router.quotas.quotas import Quotas
from router.quotas.usage import Usage
from router.revisions.adapter_service import AdapterService


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
    usage: Usage
    requests: Requests  # in flight
    bodies: BodyBudget  # in flight
    audit: AuditLog
    metrics: Metrics
    tracing: Tracing
