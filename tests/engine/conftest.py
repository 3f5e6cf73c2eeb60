"""What engine tests share."""

from pathlib import Path

import pytest

from cluster.local.demo import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(folder)
    return folder
