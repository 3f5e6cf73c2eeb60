"""Workers read the bucket with credentials of their own; what they may not write, the bucket refuses."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import boto3
import pytest
from support.adapters.s3_server import BUCKET, s3_double
from support.adapters.stored_objects import revision, source
from support.clusters.configs import config_of

from adapters.store import S3Access, StoreUnavailable
from cluster.open_library import open_configured_store, open_store_of_workers

ACTIONS = {"router": ["s3:*"], "worker": ["s3:GetObject", "s3:ListBucket"]}  # as docs/security.md has them


@contextmanager
def users(access: S3Access, folder: Path) -> Iterator[Path]:
    """A file with a profile for each user; meanwhile the server asks for signatures and looks at policies."""
    iam = boto3.client(
        "iam", endpoint_url=access.endpoint_url, region_name=access.region,
        aws_access_key_id=access.access_key, aws_secret_access_key=access.secret_key,
    )  # fmt: skip
    profiles = folder / "credentials"
    lines = []
    for name, actions in ACTIONS.items():
        iam.create_user(UserName=name)
        statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
        iam.put_user_policy(UserName=name, PolicyName="store", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        lines += [
            f"[{name}]",
            f"aws_access_key_id = {key['AccessKeyId']}",
            f"aws_secret_access_key = {key['SecretAccessKey']}",
        ]
    profiles.write_text("\n".join(lines))
    unchecked_calls(access, "0")
    try:
        yield profiles
    finally:
        unchecked_calls(access, "inf")


def unchecked_calls(access: S3Access, count: str) -> None:
    """Tell the server how many calls it answers without looking at who makes them."""
    url, headers = f"{access.endpoint_url}/moto-api/reset-auth", {"content-type": "text/plain"}
    urlopen(Request(url, count.encode(), headers, method="POST")).close()


@pytest.mark.slow
def test_workers_read_and_do_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with s3_double() as access, users(access, tmp_path) as profiles:
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profiles))
        store = {"url": f"s3://{BUCKET}/{tmp_path.name}", "s3_endpoint_url": access.endpoint_url}
        store |= {"s3_region": access.region, "s3_profile": "router", "s3_worker_profile": "worker"}
        config = config_of({"u": "unified"}, store=store)
        of_router, of_worker = open_configured_store(config), open_store_of_workers(config)
        of_router.publish(revision(1), source(tmp_path, b"weights"))
        of_worker.fetch(revision(1), tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == b"weights"
        with pytest.raises(StoreUnavailable):
            of_worker.publish(revision(2), source(tmp_path, b"other"))
        with pytest.raises(StoreUnavailable):
            of_worker.delete(revision(1))
        assert [each.revision_id for each in of_router.list()] == [revision(1)]
        of_router.delete(revision(1))
        assert [*of_router.list()] == []


def test_without_their_own_profile_workers_have_that_of_routers():
    config = config_of({"u": "unified"}, store={"url": "s3://bucket", "s3_profile": "both"})
    for store in (open_configured_store(config), open_store_of_workers(config)):
        assert store._objects._filesystem.kwargs == {"profile": "both"}
