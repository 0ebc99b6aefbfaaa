"""Who reaches a server that listens somewhere, and whether it may listen there."""

import ipaddress


class Unprotected(ValueError):
    """A server would be open to everybody who reaches it; the text is one line that says what to do."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there. A name that is not localhost may be anything."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_protected(option: str, address: str, *, is_protected: bool, insecure: bool, remedy: str) -> None:
    """Raises `Unprotected` if a server that listens at `address`, as `option` says, has no protection and nobody has
    said that it needs none. `address` is a host, or an endpoint of ZMQ."""
    if is_protected or insecure or is_local(address):
        return
    raise Unprotected(
        f"{option} {address or chr(39) * 2} is reached from elsewhere: {remedy}, or say --insecure"
    )


def is_local(address: str) -> bool:
    """Whether only this machine reaches it: a host, or an endpoint of ZMQ."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        return is_loopback(address)
    return scheme in ("ipc", "inproc") or is_loopback(rest.rpartition(":")[0])
