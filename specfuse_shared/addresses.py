"""Server addresses: which are well formed, which are loopback, and which certificates TLS trusts."""

from __future__ import annotations

import ipaddress
import ssl
from functools import cache
from urllib.parse import urlsplit

from specfuse_shared.errors import ConfigError


def server_address(what: str, url: str) -> str:
    """`url` without a trailing slash or "/v1". Raises `ConfigError`, which calls it `what`, if it is no address."""
    address = url.strip().rstrip("/").removesuffix("/v1")
    if not _is_address(address):
        # anything in the position of a password is hidden
        safe_url = "…" if "@" in url else url
        raise ConfigError(f"{what} is {safe_url!r}: give the address of a server, such as http://127.0.0.1:8000")
    return address


def is_loopback(host: str) -> bool:
    """Only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_private(address: str) -> bool:
    """The connection is private: TLS, or this machine."""
    parts = urlsplit(address)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


@cache
def trusted() -> ssl.SSLContext:
    """TLS trust store, cached: reading the certificates takes as long as a forward pass."""

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
