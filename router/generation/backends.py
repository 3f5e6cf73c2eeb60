"""The dependencies that all generations of one router share."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config.router import RouterConfig
from router.fleet.fleet import Fleet
from router.generation.engine_calls import Engines
from router.metrics import Metrics
from router.placement.placer import Placer
from router.placement.prompt_meter import PromptMeter


@dataclass(frozen=True, slots=True)
class Backends:
    """Fleet, engine connections, metrics and configuration of this router."""

    fleet: Fleet
    engines: Engines
    metrics: Metrics
    config: RouterConfig
    placer: Placer
    prompts: PromptMeter
    model: str  # the name that engines know the base model by
