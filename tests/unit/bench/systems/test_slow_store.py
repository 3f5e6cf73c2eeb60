"""The benchmark's slow store: the content of a folder's store, with a delay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from adapters.store import Envelope, RevisionNotStored, S3Access, StoreUnavailable, open_store
from bench.systems.slow_store import BUCKET, slow_store

REVISION, OTHER = (f"sha256:{digit * 64}" for digit in "ab")


@pytest.mark.slow
def test_it_has_what_the_folder_has_and_answers_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = os.urandom(1000) * 9000  # three parts
    (tmp_path / "packed").write_bytes(content)
    open_store(f"file://{tmp_path}/store").publish(REVISION, tmp_path / "packed")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with slow_store(tmp_path / "store", 0.1) as endpoint:
        store = open_store(f"s3://{BUCKET}", S3Access(endpoint, "eu-central-1"))
        store.exists(REVISION)  # what a client sets up at first
        began_at = time.monotonic()
        claimed, rest = store.begin_read(REVISION)
        assert time.monotonic() - began_at > 0.1
        assert b"".join(part for part in rest if not isinstance(part, Envelope)) == content
        assert time.monotonic() - began_at > 0.2
        assert claimed.content_bytes == len(content)
        with pytest.raises(RevisionNotStored):
            store.begin_read(OTHER)
    with pytest.raises(StoreUnavailable):
        store.exists(REVISION)
