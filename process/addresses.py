"""Addresses as URLs and gRPC write them."""


def host_and_port(host: str, port: int) -> str:
    """Host and port as in a URL: an IPv6 address has brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
