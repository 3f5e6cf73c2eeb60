"""The error trees of adapters and of their store."""

from types import ModuleType

import pytest

from adapters import errors
from adapters.errors import AdapterError
from adapters.store import errors as store_errors


@pytest.mark.parametrize("module", [errors, store_errors])
def test_every_error_says_how_it_is_answered(module: ModuleType):
    classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, AdapterError)]
    assert len({each.code for each in classes}) == len(classes) > 5
    for each in classes:
        assert 400 <= each.http_status < 600
        assert isinstance(each.retryable, bool)
        assert each.__name__ in str(module.__doc__)
