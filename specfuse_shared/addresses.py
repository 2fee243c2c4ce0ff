"""Addresses of servers: which are well formed, which stay on this machine, and whom TLS trusts."""

from __future__ import annotations

import ipaddress
import ssl
from functools import cache
from urllib.parse import urlsplit

from specfuse_shared.errors import ConfigError


def server_address(what: str, url: str) -> str:
    """`url` without a slash or "/v1" at its end. Raises `ConfigError`, which calls it `what`, for what is none."""
    address = url.strip().rstrip("/").removesuffix("/v1")
    if not _is_address(address):
        # what stands where a password would is not repeated
        shown = "…" if "@" in url else url
        raise ConfigError(f"{what} is {shown!r}: give the address of a server, such as http://127.0.0.1:8000")
    return address


def is_loopback(host: str) -> bool:
    """Only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(address: str) -> bool:
    """Nobody between here and the server can read what is sent: by TLS, or on this machine."""
    parts = urlsplit(address)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


@cache
def trusted() -> ssl.SSLContext:
    """Whom TLS trusts: reading the certificates takes as long as a forward, so not for every answer."""
    import httpx

    return httpx.create_ssl_context()


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # no such port
        return False
    is_bare = "@" not in parts.netloc and not parts.query and not parts.fragment
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and is_bare
