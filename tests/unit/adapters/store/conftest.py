"""What tests of the store share."""

import pytest
from support.adapters.s3_server import BUCKET

from adapters.store import AdapterStore, open_store


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, tmp_path) -> AdapterStore:
    """An empty store."""
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/store")
    return open_store(f"s3://{BUCKET}/{tmp_path.name}", request.getfixturevalue("s3"))
