"""The six dashboards, as data."""

from __future__ import annotations

from observability.dashboards import adapters, capacity, health, latency, tenants, throughput
from observability.panels import Dashboard

DASHBOARDS: tuple[Dashboard, ...] = (
    throughput.DASHBOARD,
    latency.DASHBOARD,
    adapters.DASHBOARD,
    capacity.DASHBOARD,
    tenants.DASHBOARD,
    health.DASHBOARD,
)
