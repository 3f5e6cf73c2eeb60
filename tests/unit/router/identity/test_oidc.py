"""Tokens of a real issuer on this machine: what is accepted, what is refused, rotation and outages."""

import base64
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from support.routers.keyed_cluster import keyed_cluster
from support.routers.local_issuer import AUDIENCE, LocalIssuer, local_issuer

from adapters.scopes import Scope
from cluster.config.router import AuthConfig, OidcConfig
from router.errors import IdentityUnavailable, Unauthenticated
from router.identity import issuer as issuer_module
from router.identity.issuer import IssuerError, read_keys
from router.identity.oidc import OidcTokens


@pytest.fixture
def issuer() -> Iterator[LocalIssuer]:
    with local_issuer() as running:
        yield running


def config_of(issuer: LocalIssuer, **fields: Any) -> OidcConfig:
    return OidcConfig.model_validate({"issuer": issuer.url, "audience": AUDIENCE, **fields})


@asynccontextmanager
async def following(config: OidcConfig) -> AsyncIterator[OidcTokens]:
    tokens = OidcTokens([config])
    async with tokens.following():
        yield tokens


async def outcome(issuer: LocalIssuer, token: str, **fields: Any) -> Any:
    """The principal, or the message of the refusal. A refused token is refused from memory, too."""
    async with following(config_of(issuer, **fields)) as tokens:
        try:
            principal = await tokens.verified(token)
        except Unauthenticated as error:
            with pytest.raises(Unauthenticated):
                tokens.known(token)
            return str(error)
        assert tokens.known(token) is principal
        return principal


async def test_a_token_is_its_holder(issuer: LocalIssuer):
    principal = await outcome(issuer, issuer.token(scope="openid infer adapters:read nonsense"))
    assert (principal.tenant, principal.name, principal.key_id) == ("acme", "acme token of ada", None)
    assert principal.scopes == {Scope.INFER, Scope.ADAPTERS_READ}


async def test_the_claim_map(issuer: LocalIssuer):
    fields: dict[str, Any] = {"tenant_claim": "org.name", "scope_claim": "https://x.y/roles"}
    fields |= {"scopes": {"user": ["infer"], "boss": ["admin", "infer"]}}
    token = issuer.token(**{"org": {"name": "beta"}, "https://x.y/roles": ["user", "boss", "admin", 7]})
    principal = await outcome(issuer, token, **fields)
    assert (principal.tenant, principal.scopes) == ("beta", {Scope.INFER, Scope.ADMIN})
    token = issuer.token(**{"org": {"name": "beta"}, "https://x.y/roles": ["admin"]})
    assert (await outcome(issuer, token, **fields)).scopes == set()  # only what the map says


@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"aud": "other"}, "Audience"),
        ({"aud": ...}, "aud"),
        ({"exp": ...}, "exp"),
        ({"exp": int(time.time()) - 60}, "expired"),
        ({"exp": "soon"}, "not valid"),
        ({"exp": float("inf")}, "not valid"),
        ({"nbf": int(time.time()) + 86_400}, "not yet valid"),
        ({"iss": "https://evil.example"}, "does not know"),
        ({"tenant": ...}, "is missing"),
        *(
            ({"tenant": each}, "not a tenant's name")
            for each in ("", "*", "acme/bot", "../acme", ["acme"], {"acme": 1})
        ),
        ({"tenant": "а"}, "not a tenant's name"),  # Cyrillic
    ],
)
async def test_claims_that_are_refused(issuer: LocalIssuer, claims: dict[str, Any], expected: str):
    message = await outcome(issuer, issuer.token(**claims))
    assert isinstance(message, str)
    assert expected in message


def forged(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(each).rstrip(b"=").decode() for each in parts)


async def test_tokens_that_are_forged(issuer: LocalIssuer):
    claims, good = issuer.claims(scope="admin"), issuer.token()
    public = issuer.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    secret = {"alg": "HS256", "kid": "one"}
    signed = forged(secret, claims).rpartition(".")[0].encode()
    head, _, signature = good.rpartition(".")
    other = LocalIssuer()
    tokens = {
        "no signature": forged({"alg": "none", "kid": "one"}, claims),
        "a shared secret that is the public key": forged(secret, claims, hmac.digest(public, signed, "sha256")),
        "a list of issuers": forged({"alg": "ES256", "kid": "one"}, {**claims, "iss": [issuer.url]}),
        "another algorithm": forged({"alg": "RS256", "kid": "one"}, claims, b"x" * 256),
        "another signature": f"{head}.{signature[:-4]}AAAA",
        "other claims": forged({"alg": "ES256", "kid": "one"}, claims, base64.urlsafe_b64decode(signature + "==")),
        "somebody's own key": jwt.encode(claims, other.key, "ES256", headers={"kid": "one"}),
        "a key in the header": jwt.encode(claims, other.key, "ES256", headers={"jwk": other.jwk(), "kid": "two"}),
        "a key id that is a path": jwt.encode(claims, other.key, "ES256", headers={"kid": "../../dev/null"}),
        "a key id that is a list": forged({"alg": "ES256", "kid": ["one"]}, claims),
        "deep": forged({"alg": "ES256"}, claims).replace(".", "." + base64.b64encode(b"[" * 9000).decode(), 1),
        "nothing": "..",
    }
    for what, token in tokens.items():
        assert isinstance(await outcome(issuer, token), str), what
    assert not isinstance(await outcome(issuer, good), str)


async def test_an_expired_token_is_forgotten(issuer: LocalIssuer):
    now = time.time()
    clock = [now]
    tokens = OidcTokens([config_of(issuer)], lambda: clock[0])
    async with tokens.following():
        token = issuer.token(exp=int(now) + 100)
        await tokens.verified(token)
        assert tokens.known(token)
        clock[0] += 131
        with pytest.raises(Unauthenticated, match="expired"):
            tokens.known(token)


async def test_rotation_and_outage(issuer: LocalIssuer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(issuer_module, "_MIN_GAP_S", 0.0)
    async with following(config_of(issuer)) as tokens:
        old = issuer.token()
        await tokens.verified(old)
        issuer.is_down = True
        assert await tokens.verified(issuer.token(sub="bob"))  # a known key's new token
        issuer.rotate("two")
        new = issuer.token()
        with pytest.raises(IdentityUnavailable):  # it may be good: nobody can tell
            await tokens.verified(new)
        assert tokens.known(old)
        issuer.is_down, keys = False, issuer.documents["/jwks"]
        issuer.documents["/jwks"] = {"keys": [{**issuer.jwk(), "kid": ["what no library foresees"]}]}
        with pytest.raises(IdentityUnavailable):
            await tokens.verified(new)
        issuer.documents["/jwks"] = keys
        assert (await tokens.verified(new)).tenant == "acme"
        assert tokens.known(old) is None  # the key that signed it is gone, so it is verified again
        with pytest.raises(Unauthenticated, match="does not have"):
            await tokens.verified(old)


async def test_made_up_key_ids_do_not_make_the_router_read_keys(issuer: LocalIssuer):
    async with following(config_of(issuer)) as tokens:
        await tokens.verified(issuer.token())
        before = issuer.num_reads
        for n in range(50):
            with pytest.raises(Unauthenticated):
                await tokens.verified(forged({"alg": "ES256", "kid": f"k{n}"}, issuer.claims()))
        assert issuer.num_reads == before


def test_issuers_that_cannot_be_used(issuer: LocalIssuer):
    def message(**fields: Any) -> str:
        with pytest.raises(IssuerError) as error:
            read_keys(config_of(issuer, **fields))
        return str(error.value)

    assert "1024 bits" in (issuer.weaken(), message())[1]
    assert "503" in message(jwks_url=f"{issuer.url}/nowhere")
    issuer.documents["/jwks"] = {"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "secret"}]}
    assert "no key that can be used" in message()
    issuer.documents["/jwks"] = b"x" * (1024**2 + 1)
    assert "over" in message()
    issuer.documents["/.well-known/openid-configuration"] = {
        "issuer": "https://other",
        "jwks_uri": f"{issuer.url}/jwks",
    }
    assert "other" in message()
    issuer.documents["/.well-known/openid-configuration"] = {"issuer": issuer.url, "jwks_uri": "http://evil.example/x"}
    assert "not https" in message()
    for url in ("http://login.example.com", "ftp://x", "nonsense"):
        with pytest.raises(ValueError, match="https"):
            AuthConfig.model_validate({"oidc": [{"issuer": url, "audience": "x"}]})


async def test_tokens_over_http(issuer: LocalIssuer, tmp_path: Path):
    auth = {"keys": True, "oidc": [{"issuer": issuer.url, "audience": AUDIENCE}]}
    async with keyed_cluster(tmp_path, auth=auth) as keyed:
        status, answer = await keyed.complete(issuer.token(), adapter="acme/bot")
        assert status == 200, answer
        assert keyed.cluster.prefill[0].engine.requests[-1]["extra_key"] == "acme|"
        assert (await keyed.complete(issuer.token(tenant="beta"), adapter="acme/bot"))[0] == 404
        assert (await keyed.complete(issuer.token(scope="")))[0] == 403
        assert (await keyed.complete(issuer.token(aud="x")))[0] == 401
        assert (await keyed.complete(await keyed.key("acme")))[0] == 200  # keys beside tokens
