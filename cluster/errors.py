"""What can go wrong between Prelude's processes, and how it is said over gRPC."""

from __future__ import annotations

# Trailing metadata of EnsureAdapter, by which an agent says which AdapterError it was.
ERROR_CODE_KEY = "prelude-error-code"
HTTP_STATUS_KEY = "prelude-http-status"
RETRY_AFTER_KEY = "prelude-retry-after-s"  # of errors that pass: when to try again, in seconds


class ClusterError(Exception):
    """Any failure of the parts that the processes share."""


class ConfigError(ClusterError):
    """`cluster.yaml` cannot be used. The message has a line per problem, each with file and line."""


class StartError(ClusterError):
    """A process of the cluster did not come up."""
