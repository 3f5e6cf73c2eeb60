"""A real OIDC issuer on this machine: discovery, keys, and tokens that it signs."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

AUDIENCE = "prelude"


class LocalIssuer:
    """An issuer with one key, of an elliptic curve."""

    def __init__(self) -> None:
        self.num_reads = 0  # of its keys
        self.is_down = False
        self.documents: dict[str, Any] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.documents["/.well-known/openid-configuration"] = {"issuer": self.url, "jwks_uri": f"{self.url}/jwks"}
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

    def serve(self) -> None:
        self._server.serve_forever(poll_interval=0.02)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.num_reads += self.path == "/jwks"
                found = None if issuer.is_down else issuer.documents.get(self.path)
                body = found if isinstance(found, bytes) else json.dumps(found).encode()
                self.send_response(200 if found is not None else 503)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@contextmanager
def local_issuer() -> Iterator[LocalIssuer]:
    issuer = LocalIssuer()
    thread = threading.Thread(target=issuer.serve)
    thread.start()
    try:
        yield issuer
    finally:
        issuer.stop()
        thread.join()
