"""Where a request goes while no router answers: consistent hashing of clients, with bounded loads.

Rule. Each client has its own order of the workers (`routers.preferred`). Its request goes to the first worker
whose load is below (1 + SLACK) times the mean, the request itself counted; if there is none, to the least loaded. So
a client stays with one worker, where its prefixes are cached; all gateways agree on which; and a worker that comes or
goes moves only the clients whose first choice it is (Mirrokni, Thorup, Zadimoghaddam 2018).
Unit: this gateway's requests in flight, divided by capacity. Bound: no load exceeds (1 + SLACK) times the mean,
rounded up. Knobs: SLACK. Leaks: different prefixes of one client are not told apart, and nothing here is fair:
fairness is left to the replicas.
"""

from collections.abc import Mapping

from router.gateway.routing.routers import preferred

SLACK = 0.25
"""How far above the mean a load may be before a client goes elsewhere."""


def choose(client: str, in_flight: Mapping[str, int], capacity: Mapping[str, float]) -> str:
    """The worker for a request of `client`, one of those in `in_flight`, which must not be empty."""
    bound = (1 + SLACK) * (sum(in_flight.values()) + 1) / sum(capacity[name] for name in in_flight)
    for name in preferred(client, in_flight):
        if in_flight[name] / capacity[name] < bound:
            return name
    return min(in_flight, key=lambda name: (in_flight[name] / capacity[name], name))
