"""Rendezvous hashing: each client has its own order of any set of names, by a hash of both.

All gateways agree on the order, and a name that comes or goes moves only the clients whose first it is (Thaler and
Ravishankar 1998, "Using name-based mappings to increase hit rates", section III).
"""

import hashlib
from collections.abc import Iterable


def preferred(client: str, names: Iterable[str]) -> list[str]:
    """`names` in the order in which `client` goes to them."""
    key = hashlib.blake2b(client.encode()).digest()
    return sorted(names, key=lambda name: (hashlib.blake2b(name.encode(), key=key).digest(), name))
