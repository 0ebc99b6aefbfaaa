"""Where a request goes while no router answers: consistent hashing of the client with bounded loads.

Rule. Every client has an order of the workers, by the hash of both names. Its request goes to the first of
them whose load is below (1 + SLACK) times the mean, the request itself counted; if there is none, to the least
loaded. So a client keeps to one worker, where its prefixes are cached, all gateways agree on which, and a worker
that comes or goes moves only the clients that are nearest to it (Mirrokni, Thorup, Zadimoghaddam 2018).
Unit: requests of this gateway in flight, divided by capacity. Bound: no load exceeds (1 + SLACK) times the mean,
rounded up. Knobs: SLACK. Leaks: a client's own prefixes are not weighed against each other, and nothing is
fair here: fairness between clients is the replicas' own.
"""

import hashlib
from collections.abc import Mapping

SLACK = 0.25
"""How far above the mean a load may be before a client goes elsewhere."""


def choose(client: str, in_flight: Mapping[str, int], capacity: Mapping[str, float]) -> str:
    """The worker for a request of `client`, among those that `in_flight` names; there is at least one."""
    bound = (1 + SLACK) * (sum(in_flight.values()) + 1) / sum(capacity[name] for name in in_flight)
    for name in sorted(in_flight, key=lambda name: (_distance(client, name), name)):
        if in_flight[name] / capacity[name] < bound:
            return name
    return min(in_flight, key=lambda name: (in_flight[name] / capacity[name], name))


def _distance(client: str, worker: str) -> bytes:
    return hashlib.blake2b(worker.encode(), key=hashlib.blake2b(client.encode()).digest()).digest()
