"""Errors of the parts that processes share, and how gRPC calls carry them."""

from adapters.errors import AdapterError

# Trailing metadata of failed adapter calls: it identifies the AdapterError.
ERROR_CODE_KEY = "prelude-error-code"
HTTP_STATUS_KEY = "prelude-http-status"
RETRY_AFTER_KEY = "prelude-retry-after-s"  # of transient errors: seconds until a retry makes sense

# Callers wait this long past the deadline that they set: at the deadline the agent reports what it was waiting for,
# such as a store that does not respond.
ANSWER_MARGIN_S = 5.0


class ClusterError(Exception):
    """Base class of errors of the parts that processes share."""


class ConfigError(ClusterError):
    """`cluster.yaml` is invalid. The message has a line per problem, each with file and line.

    `location`: the path of the field at fault, if the raising code does not know the file.
    """

    def __init__(self, message: str, *, location: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.location = location


class StartError(ClusterError):
    """A process of the cluster did not start."""


class WorkerStopping(ClusterError):
    """The worker's agent has been told to stop, so it takes no requests again."""


class RoleChangeRefused(ClusterError):
    """The worker cannot have that role now."""


class SourceUnavailable(ClusterError):
    """A source of workers did not answer."""


class DescriptionRefused(ClusterError):
    """A worker that was found describes itself in a way that forbids its use. The message says why."""


class AdapterHolderBusy(AdapterError):
    """A worker has no capacity for another adapter now: host memory or load queue. Another worker may have."""

    code = "adapter_holder_busy"
    http_status = 503
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
