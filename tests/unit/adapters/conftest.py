"""What tests of adapters share."""

from collections.abc import Iterator

import pytest
from support.adapters.s3_server import BUCKET, s3_double

from adapters.store import AdapterStore, S3Access, open_store


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Access]:
    with s3_double() as access:
        yield access


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, tmp_path) -> AdapterStore:
    """An empty store."""
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/store")
    return open_store(f"s3://{BUCKET}/{tmp_path.name}", request.getfixturevalue("s3"))
