"""Requests that Schemathesis makes from the router's own OpenAPI document: as described, and as forbidden.

Every answer is as described, none is a 5xx, and afterwards the router and its workers are as before.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import requests
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from support.routers.hostile_requests import HostileRequest, Sender, sending

schemathesis = pytest.importorskip("schemathesis", reason="make test installs it")
_SHARES = {
    "/v1/chat/completions": 8, "/v1/completions": 8, "/v1/score": 4, "/v1/embeddings": 4, "/v1/responses": 6,
    "/v1/tokenize": 4,
    "/v1/detokenize": 2,
}  # fmt: skip
_NAMES = ("a0", "everywhere", "base:a0", "a0@r1", "a0@latest", "../a0", "a0/../a0", "нет", "a" * 300, "%2e%2e", "a0%00")


def check(count: int, folder: Path, paths: Collection[str] = ()) -> Counter[int]:
    """Send about `count` requests to these paths, or to all."""
    with sending(folder) as sender, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Schemathesis's, about formats that it has no examples of
        operations = [*_operations(sender, paths)]
        total = 2 * sum(share for _, share in operations)
        for operation, share in operations:
            for mode in schemathesis.GenerationMode:
                _generate(operation, mode, max(1, count * share // total), sender)
    return sender.statuses


def _operations(sender: Sender, paths: Collection[str]) -> Iterator[tuple[Any, int]]:
    """The operations of these paths, or all of the document; and the share of each in the requests."""
    for found in schemathesis.openapi.from_dict(sender.described.document).get_all_operations():
        operation = found.ok()
        if not paths or operation.path in paths:
            yield operation, _SHARES.get(operation.path, 1)


def _generate(operation: Any, mode: Any, count: int, sender: Sender) -> None:
    """Send `count` requests of the operation; none, if the mode has nothing to vary in it."""
    names = cycle(_NAMES)

    @settings(
        max_examples=count, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        name = next(names)
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "base"  # or hardly any would be known
            if isinstance(case.body.get("adapter"), str):
                case.body["adapter"] = name
        elif "name" in (case.path_parameters or {}) and len(str(case.path_parameters["name"])) % 2:
            case.path_parameters["name"] = name
        try:
            made = requests.Request(**case.as_transport_kwargs(sender.url)).prepare()
        except (UnicodeError, requests.exceptions.InvalidHeader, requests.exceptions.InvalidURL):
            return  # no client could send it
        headers = {each.lower(): value for each, value in made.headers.items() if each.lower() != "content-length"}
        body = made.body.encode() if isinstance(made.body, str) else made.body
        sender.add(HostileRequest(str(made.method), str(made.url).removeprefix(sender.url), headers, body))

    try:
        send()
    except Unsatisfiable:
        return


@pytest.mark.slow
def test_described_and_forbidden_requests(tmp_path: Path):
    """Of the paths with the largest schemas: making a generator for each of all paths takes longer than the rest."""
    statuses = check(300, tmp_path, _SHARES)
    assert statuses[200] > 10
    assert statuses[400] > 50


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_described_and_forbidden_requests(tmp_path: Path):
    statuses = check(140_000, tmp_path)  # many operations have fewer different requests than their share
    print(f"{statuses.total()} requests: {dict(statuses)}")
    assert statuses.total() > 100_000
