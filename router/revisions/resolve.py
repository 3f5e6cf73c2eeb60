"""Resolves `model` and `adapter` of a request to one revision, or to the base model."""

from __future__ import annotations

from typing import Protocol

from adapters.catalog.records import AdapterRevision
from adapters.errors import AdapterError, AdapterNotFound, CatalogUnavailable, InvalidReference
from router.errors import ConflictingAdapters, InvalidField, UnknownModel
from router.identity.principal import Principal
from router.revisions.adapter_service import AdapterService


def reference_in(model: str, adapter: str | None, base: str) -> str | None:
    """The adapter that a request names, None for the base model.

    Accepted: `adapter` with `model` = base, `model` = "base:adapter", `model` = "adapter"; naming it twice is allowed.
    """
    if model == base:
        return adapter
    in_model = model.removeprefix(f"{base}:")
    if not in_model:
        raise InvalidField(f"model {model!r} names no adapter after the colon", param="model")
    if adapter is not None and adapter != in_model:
        raise ConflictingAdapters(
            f"adapter is {adapter!r} but model names {in_model!r}; say one of them, or set model to {base!r}",
            param="adapter",
        )
    return in_model


class NamesModel(Protocol):
    """The fields of a request that name its target."""

    @property
    def model(self) -> str: ...

    @property
    def adapter(self) -> str | None: ...


async def resolve(
    validated: NamesModel, base: str, adapters: AdapterService, principal: Principal
) -> AdapterRevision | None:
    """The revision that a principal's request names; None: the base model. Raises UnknownModel or an AdapterError."""
    reference = reference_in(validated.model, validated.adapter, base)
    if reference is None:
        return None
    try:
        return await adapters.resolve_for(principal, reference)
    except (AdapterNotFound, InvalidReference) as error:
        if validated.adapter is not None or validated.model.startswith(f"{base}:"):
            raise
        raise UnknownModel(
            f"the model {validated.model!r} does not exist: the base model is {base!r}, and as an adapter: {error}",
            param="model",
        ) from error
    except CatalogUnavailable:
        raise
    except AdapterError as error:
        raise type(error)(f"the adapter {reference!r} cannot be served: {error}") from error
