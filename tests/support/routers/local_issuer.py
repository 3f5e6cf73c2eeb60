"""A real OIDC issuer on this machine: discovery, keys, and tokens that it signs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jwt
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm
from support.in_thread import in_thread
from support.routers.served_routes import served

AUDIENCE = "prelude"


class LocalIssuer:
    """An issuer with one key, of an elliptic curve."""

    def __init__(self) -> None:
        self.num_reads = 0  # of its keys
        self.is_down = False
        self.documents: dict[str, Any] = {}
        self.url = ""
        self.rotate("one")

    def rotate(self, key_id: str) -> None:
        """Have another key instead of the one before."""
        self.key, self.key_id = ec.generate_private_key(ec.SECP256R1()), key_id
        self.documents["/jwks"] = {"keys": [self.jwk()]}

    def jwk(self) -> dict[str, Any]:
        return {**ECAlgorithm.to_jwk(self.key.public_key(), as_dict=True), "kid": self.key_id, "use": "sig"}

    def weaken(self) -> None:
        """Have an RSA key that is too short."""
        key = rsa.generate_private_key(65537, 1024).public_key()
        self.documents["/jwks"] = {"keys": [{**RSAAlgorithm.to_jwk(key, as_dict=True), "kid": "weak"}]}

    def claims(self, **claims: Any) -> dict[str, Any]:
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "exp": now + 600, "iat": now}
        both = {**usual, "tenant": "acme", "scope": "openid infer", **claims}
        return {name: value for name, value in both.items() if value is not ...}

    def token(self, **claims: Any) -> str:
        """A token with these claims; `...` leaves one out."""
        return jwt.encode(self.claims(**claims), self.key, "ES256", headers={"kid": self.key_id})

    async def answer(self, request: web.Request) -> web.Response:
        self.num_reads += request.path == "/jwks"
        found = None if self.is_down else self.documents.get(request.path)
        if isinstance(found, bytes):
            return web.Response(body=found)
        return web.json_response(found, status=200 if found is not None else 503)


@contextmanager
def local_issuer() -> Iterator[LocalIssuer]:
    issuer = LocalIssuer()
    with in_thread(served([web.get("/{path:.*}", issuer.answer)])) as url:
        issuer.url = url
        issuer.documents["/.well-known/openid-configuration"] = {"issuer": url, "jwks_uri": f"{url}/jwks"}
        yield issuer
