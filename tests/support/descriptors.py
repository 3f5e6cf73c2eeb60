"""Takes all descriptors of this process, as a leak or a burst would."""

import contextlib
import os
import resource
from collections.abc import Iterator

_SPARE = 64  # above those in use, so that few have to be taken


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Inside, whatever needs a new descriptor fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    most = max(int(each) for each in os.listdir("/proc/self/fd")) + _SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, soft), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
