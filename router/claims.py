"""Which replicas' queues this process plans: no other router of this machine may plan for one of them.

Each router orders queues as if it had their replicas alone. Routers do not talk to each other; so a claim is a name
that one process of the machine has at a time (`common.marks`), and the kernel frees it when it dies. Routers on
different machines do not see each other's; of those, gateways use one (`gateway.routing.routers`).
"""

from collections.abc import Iterable
from hashlib import blake2b
from ipaddress import ip_address
from urllib.parse import urlsplit

from sglang_fair.common.marks import Marks


class Claims:
    """Those of one router, until `close`."""

    def __init__(self) -> None:
        """None yet."""
        self._marks = Marks("queue")
        self._held: set[str] = set()

    def take(self, url: str) -> bool:
        """Claims the replica at `url`. False if another router has it."""
        name = _name(url)
        if name not in self._held and not self._marks.take(name):
            return False
        self._held.add(name)
        return True

    def keep(self, urls: Iterable[str]) -> None:
        """Gives up all claims but these."""
        gone = self._held - {_name(url) for url in urls}
        self._marks.give_back(*gone)
        self._held -= gone

    def close(self) -> None:
        """Gives up all."""
        self._marks.close()


def _name(url: str) -> str:
    """The same for all names of this machine's own address; of a length that a socket's name can have."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        host, port = url, 0
    name = f"{'localhost' if _is_own(host) else host}:{port}"
    return blake2b(name.encode(), digest_size=16).hexdigest()


def _is_own(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
