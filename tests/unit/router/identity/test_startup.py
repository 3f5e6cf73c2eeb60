"""Checks at the start: an error names file, line and remedy."""

from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine, update
from support.routers.local_issuer import local_issuer

from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.tables import api_keys
from adapters.scopes import Scope
from cluster.config.load import load_cluster_config, located
from cluster.errors import ConfigError
from process.addresses import host_and_port
from router.identity.startup import check_identity

HEAD = "model: {path: ., name: demo}\nworkers:\n  u: {role: unified}\nrouter:\n"  # the next line is the fifth


def outcome(folder: Path, router: str) -> str:
    """What the operator is told, or the error."""
    path = folder / "cluster.yaml"
    path.write_text(HEAD + router)
    try:
        with located(path):
            return check_identity(load_cluster_config(path))
    except ConfigError as error:
        return f"error {error}".replace(f"{folder}/", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1"])
def test_an_open_router_serves_its_machine(tmp_path: Path, host: str):
    assert outcome(tmp_path, f"  host: '{host}'\n") == (
        "There is no authentication: the router serves this machine only."
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example.com", "localhost.example.com"])
def test_an_open_router_beyond_it_must_be_wanted(tmp_path: Path, host: str):
    found = outcome(tmp_path, f"  port: 1\n  host: '{host}'\n")
    assert found.startswith("error cluster.yaml:6: router.host: ")
    assert "{auth: {}}`" in found
    assert "prelude keys create" in found
    assert "insecure: true" in found
    wanted = outcome(tmp_path, f"  port: 1\n  host: '{host}'\n  insecure: true\n")
    assert wanted == f"There is no authentication: whoever reaches {host_and_port(host, 1)} can use the router."


def test_keys_that_nobody_has(tmp_path: Path):
    router = "  host: 0.0.0.0\n  auth:\n    keys: true\n"
    found = outcome(tmp_path, router)
    assert found.startswith("error cluster.yaml:7: router.auth.keys: there is no key in the catalog")
    assert "prelude keys create" in found
    catalog = SqlCatalog.open(f"sqlite:///{tmp_path / '.prelude' / 'catalog.db'}")
    an_hour = timedelta(hours=1)
    catalog.keys.create("acme", "short", {Scope.INFER}, expires_at=catalog.now() + an_hour, by=None)
    ended = update(api_keys).values(expires_at=catalog.now() - an_hour)  # as if the hour had passed
    with create_engine(f"sqlite:///{tmp_path / '.prelude' / 'catalog.db'}").begin() as connection:
        assert connection.execute(ended).rowcount == 1
    record, _ = catalog.keys.create("acme", "revoked", {Scope.INFER}, expires_at=None, by=None)
    catalog.keys.revoke(record.key_id)
    assert "all revoked or expired" in outcome(tmp_path, router)
    catalog.keys.create("acme", "good", {Scope.INFER}, expires_at=None, by=None)
    assert outcome(tmp_path, router) == ""
    catalog.close()


def test_a_catalog_that_is_away_is_no_error(tmp_path: Path):
    away = "  auth: {}\ncatalog: {url: 'postgresql://x:y@127.0.0.1:9/z'}\n"
    assert outcome(tmp_path, away).startswith("Keys cannot be checked now")


def test_nobody_let_in(tmp_path: Path):
    assert outcome(tmp_path, "  auth: {keys: false}\n").startswith("error cluster.yaml:5: router.auth: ")


def test_issuers(tmp_path: Path):
    with local_issuer() as issuer:
        text = f"  auth:\n    oidc:\n      - audience: x\n        issuer: {issuer.url}\n"
        assert outcome(tmp_path, text) == ""
        issuer.weaken()
        found = outcome(tmp_path, text)
        assert found.startswith("error cluster.yaml:8: router.auth.oidc.0.issuer: ")
        assert "2048 are needed" in found
        issuer.is_down = True
        assert "cannot be read" in outcome(tmp_path, text)
    assert "Connection refused" in outcome(tmp_path, text)
    unknown = outcome(tmp_path, f"{text}        scopes: {{user: [infer, everything]}}\n")
    assert unknown.startswith("error cluster.yaml:9: router.auth.oidc.0.scopes: ")
    assert "'everything' is not a scope; choose from infer" in unknown
