"""What tests of the router share."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from support.router_stand_ins import ClusterStandIn, running_cluster
from support.routers.keyed_cluster import KeyedCluster, keyed_cluster


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> AbstractAsyncContextManager[ClusterStandIn]:
    """A router and a pair, which a test that is a coroutine gets running. Those that need another one start it.

    It manages adapters if the test's module says so with MANAGEMENT.
    """
    return running_cluster(management=getattr(request.module, "MANAGEMENT", False))


@pytest.fixture
def keyed(tmp_path: Path) -> AbstractAsyncContextManager[KeyedCluster]:
    """A router with keys and a pair, running as `cluster`. Its catalog is in the folder of the test."""
    return keyed_cluster(tmp_path)
