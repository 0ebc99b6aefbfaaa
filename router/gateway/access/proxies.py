"""Trusted proxies: networks from which a header that names a client is believed."""

import ipaddress
from collections.abc import Sequence
from typing import Any

from sglang_fair.settings.setting import SettingError

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def parse(text: str) -> tuple[Network, ...]:
    """The networks in `10.0.0.0/8,192.0.2.7,fd00::/8`. Raises SettingError, in one line."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(ipaddress.ip_network(part))
        except ValueError as error:
            raise SettingError(f"--trusted-proxies: {error}", "trusted_proxies") from None
    return tuple(found)


def is_trusted(networks: Sequence[Network], peer: Sequence[Any] | None) -> bool:
    """Whether the peer, (host, port), of a connection stands in one of the networks."""
    if not networks or not peer:
        return False
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:  # a Unix socket, or a name
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return any(address in network for network in networks)
