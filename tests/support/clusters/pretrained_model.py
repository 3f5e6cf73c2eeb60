"""The demo's model, which a package carries."""

import pytest

from cluster.local.pretrained import pretrained_file

needs_pretrained = pytest.mark.skipif(pretrained_file() is None, reason="NOT TESTED: requirements/demo.txt is missing")
