"""gRPC in a process that starts others."""

from __future__ import annotations

import os

_VARIABLE = "GRPC_ENABLE_FORK_SUPPORT"


def import_grpc_without_fork_handlers() -> None:
    """Import gRPC so that this process can start others safely. It has no effect where gRPC has been imported before.

    uvloop starts a process by a real fork. gRPC's handlers then start its threads anew in the child, and these can
    crash it before it becomes the other program: on two cores about one in fifteen (gRPC 1.85).
    """
    own = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "0"
    try:
        import grpc  # noqa: F401 - it reads the variable now
    finally:  # children read their own: an engine on a CPU forks, and may trace through gRPC
        if own is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = own
