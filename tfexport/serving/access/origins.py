"""Checks of the host names and of the web pages that may reach the server.

A web page of any origin can make a visitor's browser send a form or plain text to a server on the visitor's machine or
network, and can make its own name resolve to that machine (DNS rebinding). Browsers send both names: `Host` is the server
as the page calls it, and `Origin` is the page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from tfexport.errors import TfexportError
from tfexport.serving.options import ServerOptions

ANY = "*"
_PORTS = {"http": 80, "https": 443}


def hosts_of(options: ServerOptions) -> tuple[str, ...]:
    """The host names that a server with these options accepts; `*` for all.

    The default is all names, because only the operator knows the names of a machine. A server that only this machine can
    reach accepts the names of this machine.

    Raises:
        TfexportError: a name is not a host name.
    """
    if not options.allowed_hosts:
        return (options.host.lower(), "localhost") if is_loopback(options.host) else (ANY,)
    hosts = ((name, "" if "/" in name else _host_of(f"//{name}")[0]) for name in options.allowed_hosts)
    names = tuple(name if name == ANY else host for name, host in hosts)
    if "" in names:
        wrong = options.allowed_hosts[names.index("")]
        raise TfexportError(f"--allowed-host {wrong!r} is not a host name. Give it as in example.org, or * for all.")
    return names


def origins_of(options: ServerOptions) -> tuple[str, ...]:
    """The origins whose pages may call a server with these options, as browsers write them."""
    return tuple(origin.lower().rstrip("/") for origin in options.cors)


def check_host(headers: Headers, allowed: Collection[str], http_version: str) -> None:
    """Raise HTTPException unless a request has one `Host` (RFC 9112, 3.2), which is allowed."""
    hosts = headers.getlist("host")
    if len(hosts) > 1 or (not hosts and http_version == "1.1"):
        raise HTTPException(400, f"this request has {len(hosts)} Host headers. Send one.")
    if not hosts or ANY in allowed:
        return
    name = _host_of(f"//{hosts[0]}")[0]
    if name not in allowed and not (is_loopback(name) and any(map(is_loopback, allowed))):
        raise HTTPException(
            421,
            f"this server does not answer for the host {hosts[0]!r}. Call it by another name, or start it with "
            f"--allowed-host {name or 'NAME'}.",
        )


def check_origin(headers: Headers, allowed: Collection[str]) -> None:
    """Raise HTTPException if a web page of another origin sent a request, unless CORS allows this origin.

    Browsers send `Origin` with each POST. They ask first only for kinds of content that forms lack.
    """
    origin = headers.get("origin")
    if origin is None or ANY in allowed or origin in allowed:
        return
    scheme = origin.partition("://")[0]
    if _host_of(origin) != _host_of(f"{scheme}://{headers.get('host', '')}"):
        # `null` is the origin of all pages without one, so nobody should allow it.
        remedy = (
            "" if origin == "null" else f" Start it with --cors {origin}, or let the proxy pass the Host header on."
        )
        raise HTTPException(403, f"pages of {origin!r} may not call this server.{remedy}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine itself."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


@lru_cache(1024)  # requests name few hosts
def _host_of(url: str) -> tuple[str, int | None]:
    """The host and the port of a URL; nothing if it has none."""
    try:
        parts = urlsplit(url)
        return (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return "", None
