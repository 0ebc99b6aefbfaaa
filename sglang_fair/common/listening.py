"""Who reaches a server that listens somewhere."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there. A name that is not localhost may be anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_local(address: str) -> bool:
    """Whether only this machine reaches it: a host, or an endpoint of ZMQ."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return is_loopback(address)
    return scheme in ("ipc", "inproc") or is_loopback(rest.rpartition(":")[0])
