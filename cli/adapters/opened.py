"""Opens the catalog and the library for a command."""

from __future__ import annotations

import argparse
import getpass
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeVar

from adapters.errors import AdapterError
from cluster.errors import ConfigError

if TYPE_CHECKING:
    from adapters.catalog.sql import SqlCatalog
    from adapters.library import AdapterLibrary
    from cluster.config.schema import ClusterConfig

T = TypeVar("T")


@contextmanager
def opened_catalog(arguments: argparse.Namespace) -> Iterator[SqlCatalog]:
    """The catalog alone, without store and base model. Raises ConfigError and AdapterError."""
    from cluster.open_library import open_configured_catalog

    with closing(_opened(arguments, open_configured_catalog, "catalog.url: ")) as catalog:
        yield catalog


@contextmanager
def opened_library(arguments: argparse.Namespace) -> Iterator[AdapterLibrary]:
    """The library: catalog, store and base model. Raises ConfigError and AdapterError."""
    from cluster.open_library import open_library

    library = _opened(arguments, open_library)
    with closing(library.catalog):
        yield library


def _opened(arguments: argparse.Namespace, opening: Callable[[ClusterConfig], T], field: str = "") -> T:
    from cluster.config.load import load_cluster_config

    config = load_cluster_config(arguments.config)
    try:
        return opening(config)
    except ValueError as error:
        raise ConfigError(f"{arguments.config}: {field}{error}") from None


@contextmanager
def changing(
    arguments: argparse.Namespace, action: str, object: str
) -> Iterator[tuple[SqlCatalog, dict[str, str | None]]]:
    """The catalog for one change, and the note of `audited`."""
    with opened_catalog(arguments) as catalog, audited(catalog, action, object) as note:
        yield catalog, note


@contextmanager
def audited(catalog: SqlCatalog, action: str, object: str | None) -> Iterator[dict[str, str | None]]:
    """Write the change that the block makes to the audit log, with its outcome. The block may set `old` and `new`.

    Raises AdapterError if the catalog does not answer.
    """
    from adapters.catalog.records import AuditEvent

    note: dict[str, str | None] = {"object": object, "old": None, "new": None}
    outcome = "failed"
    try:
        yield note
        outcome = "done"
    except AdapterError as error:
        outcome = error.code
        raise
    finally:
        event = AuditEvent(datetime.now(UTC), this_user(), None, action, **note, outcome=outcome, request_id=None)
        catalog.audit.append([event])


def note_outcomes(arguments: argparse.Namespace, action: str, outcomes: Mapping[str, str]) -> None:
    """Write an event for each object of a change. Raises AdapterError and ConfigError if that cannot be done."""
    from adapters.catalog.records import AuditEvent

    at, who = datetime.now(UTC), this_user()
    events = [AuditEvent(at, who, None, action, each, None, None, outcome, None) for each, outcome in outcomes.items()]
    with opened_catalog(arguments) as catalog:
        catalog.audit.append(events)


def this_user() -> str:
    """The user who is recorded for alias moves."""
    try:
        return f"{getpass.getuser()} (command line)"
    except (KeyError, OSError):  # a user id without a name, as in containers
        return "command line"
