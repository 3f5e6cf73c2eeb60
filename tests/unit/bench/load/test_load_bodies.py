"""Prelude's router takes the requests of every workload as they are sent."""

import msgspec
import pytest

from bench.load.client import fields_of
from bench.load.options import Endpoint
from bench.workloads.catalog import WORKLOADS
from bench.workloads.session import CHAT
from bench.workloads.workload import Stream
from router.protocol import validation
from router.protocol.field_values import Limits

LIMITS = Limits(max_choices=128, vocabulary=500, context_length=8192)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_router_takes_them(name: str):
    workload = WORKLOADS[name]
    num_adapters = max(1, workload.num_adapters)
    endpoint = Endpoint("http://x", "base", adapters=tuple(f"a{number}" for number in range(num_adapters)))
    for session in Stream(workload, 1, num_adapters).sessions(12):
        for request in session.requests:
            path = validation.Endpoint.CHAT if request.path == CHAT else validation.Endpoint.COMPLETIONS
            body = msgspec.json.encode(fields_of(endpoint, request, session.adapter))
            found = validation.validate(path, body, LIMITS)
            assert (found.model, found.adapter) == ("base", f"a{session.adapter}")
