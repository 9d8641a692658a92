"""The names of clients without keys."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(4096)
def network_of(host: str) -> str:
    """The address of a client; for IPv6 the network, because a client has very many addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:  # a server on both kinds of sockets calls every IPv4 client ::ffff:A.B.C.D
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
