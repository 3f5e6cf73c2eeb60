"""What tests of the router share."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest
from support.router_stand_ins import ClusterStandIn, running_cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[ClusterStandIn]:
    """A router and a pair, which a test that is a coroutine gets running. Those that need another one start it.

    It manages adapters if the test's module says so with MANAGEMENT.
    """
    return running_cluster(management=getattr(request.module, "MANAGEMENT", False))
