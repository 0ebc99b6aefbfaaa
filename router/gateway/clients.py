"""How the gateway names its clients."""

import contextlib
from collections.abc import Sequence
from ipaddress import IPv6Address
from typing import Any
from urllib.parse import quote

from sglang_fair.common.identity import bounded


def header_safe(name: str) -> str:
    """`name` as it can stand in a header, so that router and replica know a client by the same name.

    Printable ASCII stays as it is; everything else, line breaks included, is percent-encoded.
    """
    if name.isascii() and name.isprintable():
        return bounded(name)
    return bounded(quote(name, safe=" !\"#$&'()*+,/:;<=>?@[\\]^`{|}"))


def address_share(peer: Sequence[Any] | None) -> str:
    """The name by which a request shares the limits while only its peer, (host, port), is known.

    No client can have such a name (`bounded` escapes the parenthesis). IPv6 addresses of one /64 share one name,
    because a single site has that many addresses.
    """
    host = str(peer[0]) if peer else ""
    if ":" in host:
        with contextlib.suppress(ValueError):
            host = str(IPv6Address(int(IPv6Address(host)) >> 64 << 64))
    return f"({host})"
