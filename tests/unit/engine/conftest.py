"""SGLang in the process of the tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def sglang() -> None:
    """It can be imported, also where there is no GPU. That takes seconds, so tests import it, not their modules."""
    from engine import cpu_support

    cpu_support.install()
