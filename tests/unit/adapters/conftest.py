"""What tests of adapters share."""

from collections.abc import Iterator

import pytest
from support.adapters.s3_server import s3_double

from adapters.store import S3Access


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Access]:
    with s3_double() as access:
        yield access
