"""What can go wrong between Prelude's processes, and how it is said over gRPC."""

from __future__ import annotations

from adapters.errors import AdapterError

# Trailing metadata of calls about adapters, by which an agent says which AdapterError it was.
ERROR_CODE_KEY = "prelude-error-code"
HTTP_STATUS_KEY = "prelude-http-status"
RETRY_AFTER_KEY = "prelude-retry-after-s"  # of errors that pass: when to try again, in seconds

# Who gives an agent a deadline waits so much longer: at the deadline the agent says what it has met, such as a store
# that does not answer, and a caller that gives up at that instant does not hear it.
ANSWER_MARGIN_S = 5.0


class ClusterError(Exception):
    """Any failure of the parts that the processes share."""


class ConfigError(ClusterError):
    """`cluster.yaml` cannot be used. The message has a line per problem, each with file and line."""


class StartError(ClusterError):
    """A process of the cluster did not come up."""


class AdapterHolderBusy(AdapterError):
    """A worker that holds adapters has no room or no hands for one more just now. Another worker may have."""

    code = "adapter_holder_busy"
    http_status = 503
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
