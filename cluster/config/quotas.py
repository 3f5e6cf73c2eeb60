"""Quotas of tenants, the section `router.quotas` of `cluster.yaml`. docs/quotas.md says what they count."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field, StringConstraints

from adapters.identity import is_tenant_name
from cluster.config.fields import Seconds, Section


def _check_tenant(name: str) -> str:
    if not is_tenant_name(name):
        raise ValueError(f"{name[:80]!r} is not a tenant's name: 1 to 63 letters, digits, '.', '_' or '-' in ASCII")
    return name


TenantName = Annotated[str, AfterValidator(_check_tenant)]
KeyId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]{12}$")]
_Count = Annotated[int, Field(ge=1)]


class UseLimits(Section):
    """Limits of requests. None: no limit."""

    requests_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    prompt_tokens_per_min: _Count | None = None
    output_tokens_per_min: _Count | None = None
    sequences: _Count | None = None  # concurrent; a request has prompts x n of them

    @property
    def are_set(self) -> bool:
        """Whether there is any limit."""
        return any(getattr(self, name) is not None for name in UseLimits.model_fields)


class TenantQuota(UseLimits):
    """Limits of one tenant's requests and of its adapters."""

    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0  # its share of a saturated fleet, relative to other tenants
    each_key: UseLimits = UseLimits()  # each of its keys has these limits, too
    adapters: Annotated[int, Field(ge=0)] | None = None
    revisions: Annotated[int, Field(ge=0)] | None = None  # of all its adapters
    adapter_bytes: Annotated[int, Field(ge=0)] | None = None  # of all its revisions; equal ones count once
    pins: Annotated[int, Field(ge=0)] | None = None  # memory-only revisions that its aliases refer to
    pushes_per_hour: _Count | None = None  # imports and pushes
    training_tokens_per_min: _Count | None = None  # that its models read at the trainer; then their commands wait
    changes_per_min: _Count | None = 120  # of adapters, of every kind: moves, deletions, pins, and pushes, too

    def over(self, default: TenantQuota) -> TenantQuota:
        """This quota, with the default's limits for fields that it does not set. A field set to null is no limit."""
        return default.model_copy(update={name: getattr(self, name) for name in self.model_fields_set})


class FairQueueConfig(Section):
    """When requests wait in the router for their tenant's turn, and for how long."""

    queue_s: ClassVar[float] = 0.05  # of prompts left to read: a worker with more gets no more
    max_requests: _Count = 1000  # waiting requests of one tenant
    timeout_s: Seconds = 30.0  # waiting time


class QuotasConfig(Section):
    """Limits of tenants and keys. Tenants that are not named have the limits of `default`."""

    # Whether routers share these limits, through the catalog's database. None: if the catalog is in PostgreSQL.
    shared: bool | None = None
    fair_queue: FairQueueConfig | None = FairQueueConfig()  # None: requests never queue in the router
    default: TenantQuota = TenantQuota()
    tenants: dict[TenantName, TenantQuota] = Field(default_factory=dict)
    keys: dict[KeyId, UseLimits] = Field(default_factory=dict)  # by id; in place of the tenant's `each_key`

    def of_tenant(self, tenant: str) -> TenantQuota:
        """A tenant's limits, those of `default` where it has none of its own."""
        own = self.tenants.get(tenant)
        return self.default if own is None else own.over(self.default)
