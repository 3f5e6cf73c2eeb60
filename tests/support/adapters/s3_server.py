"""A server on loopback that speaks S3's protocol, with one bucket."""

from collections.abc import Iterator
from contextlib import contextmanager

from fsspec.core import url_to_fs

from adapters.store import S3Access

BUCKET = "adapters"


class S3Double:
    """moto over HTTP. All doubles of one process have the same content, which outlives them."""

    def __init__(self) -> None:
        self._port = 0
        self.start()
        self.access = S3Access(f"http://127.0.0.1:{self._port}", "eu-central-1", access_key="test", secret_key="test")
        url_to_fs(f"s3://{BUCKET}", **self.access.filesystem_options())[0].makedirs(BUCKET, exist_ok=True)

    def start(self) -> None:
        """Listen, again at the same address."""
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()
        _, self._port = self._server.get_host_and_port()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._server.stop()


@contextmanager
def s3_double() -> Iterator[S3Access]:
    """How to reach a double that lives as long as the context."""
    double = S3Double()
    try:
        yield double.access
    finally:
        double.stop()
