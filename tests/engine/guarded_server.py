"""Runs SGLang's HTTP server with our hooks, but without an engine behind it: what it lets in can be seen all the same.

python guarded_server.py PORT CERTIFICATE KEY CA
"""

import sys

from engine import cpu_support

cpu_support.install()


def main(port: str, certificate: str, key: str, ca: str) -> None:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils.auth import add_api_key_middleware

    from engine.access import IN_ENVIRONMENT
    from engine.hooks.installation import install

    install("decode", "cpu")
    add_api_key_middleware(http_server.app, api_key=IN_ENVIRONMENT, admin_api_key=IN_ENVIRONMENT)
    config = http_server.uvicorn.Config(
        http_server.app,
        host="127.0.0.1",
        port=int(port),
        lifespan="off",
        log_level="error",
        loop="uvloop",
        root_path="",
        timeout_keep_alive=5,
        ssl_certfile=certificate,
        ssl_keyfile=key,
        ssl_ca_certs=ca,
        ssl_keyfile_password=None,
    )
    http_server.uvicorn.Server(config).run()  # as SGLang does


if __name__ == "__main__":
    main(*sys.argv[1:])
