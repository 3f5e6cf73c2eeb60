"""How long certificates are valid, as processes export it for the alerts on their expiry."""

import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.clusters.certificates import authority, issued

from process.certificates.contexts import Following, make_client_context
from process.certificates.expiry import METRIC, START_METRIC, export_expiry
from process.certificates.files import check


def test_begin_and_end_are_exported(tmp_path: Path):
    files = issued(authority(tmp_path / "certs"), "decode", "d")
    found, now = check(files), time.time()
    assert found.validity.begins <= now < found.validity.ends
    assert found.ca_validity is not None
    assert found.ca_validity.begins <= now < found.ca_validity.ends
    registry = CollectorRegistry()
    export_expiry(registry, lambda: {"cluster": Following(files, make_client_context).validity()})
    for name, value in ((METRIC, found.validity.ends), (START_METRIC, found.validity.begins)):
        assert registry.get_sample_value(name, {"certificate": "cluster"}) == pytest.approx(value)
