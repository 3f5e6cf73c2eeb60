"""Fields of cluster.yaml: no more than an operator can know."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from cluster.config.schema import ClusterConfig

MOST = 150


def sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from sections_in(part)


def fields_of(section: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[str]:
    """All of them, sections included. Those that several sections inherit count once, where they are declared."""
    if section in seen or section is BaseModel:
        return
    seen.add(section)
    for base in section.__bases__:
        if issubclass(base, BaseModel):
            yield from fields_of(base, seen)
    for name in section.__annotations__.keys() & section.model_fields.keys():
        yield f"{section.__name__}.{name}"
        for each in sections_in(section.model_fields[name].annotation):
            yield from fields_of(each, seen)


def test_there_are_few_fields() -> None:
    fields = sorted(fields_of(ClusterConfig, set()))
    assert {"ModelConfig.path", "EachWorkerConfig.gpus", "WorkerConfig.role", "OidcConfig.issuer"} <= set(fields)
    assert len(fields) == len(set(fields)) <= MOST, "\n".join(fields)
