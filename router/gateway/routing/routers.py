"""Which of several routers decides for a client, and, while none answers, which worker takes its requests.

Rule. Each client has its own order of the routers (`preferred`), and its requests go to the first of them that is in
service. A router is in service from its first answer on, and out of it as soon as it is lost. One that was lost and
answers again is in service once it has answered for `BACK_S` without a break, so that a router that comes and goes
does not move its clients each time, and one that was restarted has been told what it needs. Until then it is asked
after all others, before the gateway places by itself (`choose`).
One that orders the replicas' queues (placement `qlm`) does so as if it were alone: of several that do, the first named
one decides for all clients that any of them would, and the others are refused for good, whether or not it answers.
Unit: clients. Bound: a router that is lost moves its own clients only. Leaks: a router knows the load that came through
it, and each has credits of its own; what clients are entitled to is kept in the replicas, where all their requests
meet.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

BACK_S = 3.0
"""As long as the silence after which a router is lost (`links`)."""

SLACK = 0.25
"""How far above the mean a worker's load may be before a client goes elsewhere."""


def preferred(client: str, names: Iterable[str]) -> list[str]:
    """`names` in the order in which `client` goes to them, by a hash of both. All gateways agree on it, and a name that
    comes or goes moves only the clients whose first it is (rendezvous hashing: Thaler and Ravishankar 1998, "Using
    name-based mappings to increase hit rates", section III)."""
    key = hashlib.blake2b(client.encode()).digest()
    return sorted(names, key=lambda name: (hashlib.blake2b(name.encode(), key=key).digest(), name))


def choose(client: str, in_flight: Mapping[str, int], capacity: Mapping[str, float]) -> str:
    """The worker for a request of `client` while no router answers, one of those in `in_flight`, which must not be
    empty: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018).

    Rule. The first worker in the client's order whose load is below (1 + SLACK) times the mean, the request itself
    counted; if there is none, the least loaded. So a client stays with one worker, where its prefixes are cached, and
    all gateways agree on which. Unit: this gateway's requests in flight, divided by capacity. Bound: no load exceeds
    (1 + SLACK) times the mean, rounded up. Leaks: different prefixes of one client are not told apart; fairness is left
    to the replicas.
    """
    bound = (1 + SLACK) * (sum(in_flight.values()) + 1) / sum(capacity[name] for name in in_flight)
    for name in preferred(client, in_flight):
        if in_flight[name] / capacity[name] < bound:
            return name
    return min(in_flight, key=lambda name: (in_flight[name] / capacity[name], name))


class Routers:
    """State and decisions, no I/O. Times are of one monotonic clock."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names` are the routers' addresses, as all gateways write them. None is in service yet. ValueError for none,
        and for one that is named twice."""
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"routers must be different ones, at least one, not {', '.join(names) or 'none'}"
            )
        self.names = tuple(names)
        self._answers_since_s: dict[str, float] = {}
        self._in_service: set[str] = set()
        self._were_lost: set[str] = set()
        self._planning: set[str] = set()
        """Those that order the replicas' queues."""

    def answers(self, name: str, now_s: float) -> bool:
        """Router `name` has answered; whether it comes into service by that."""
        since_s = self._answers_since_s.setdefault(name, now_s)
        if name in self._in_service or (name in self._were_lost and now_s - since_s < BACK_S):
            return False
        self._in_service.add(name)
        return True

    def lost(self, name: str) -> bool:
        """Router `name` cannot be reached; whether it was in service."""
        if self._answers_since_s.pop(name, None) is not None:
            self._were_lost.add(name)
        was_in_service = name in self._in_service
        self._in_service.discard(name)
        return was_in_service

    def says(self, name: str, *, plans: bool) -> bool:
        """Whether router `name` orders the replicas' queues; whether others are refused, or no longer, by that."""
        before = [self.is_refused(one) for one in self.names]
        (self._planning.add if plans else self._planning.discard)(name)
        return before != [self.is_refused(one) for one in self.names]

    def is_refused(self, name: str) -> bool:
        """Whether it orders queues that another one orders."""
        first = next((one for one in self.names if one in self._planning), None)
        return name in self._planning and name != first

    def is_up(self, name: str) -> bool:
        return name in self._answers_since_s

    def state(self, name: str) -> str:
        """In a word: up, back (it answers again, and is not in service yet), gone, or refused: another one plans."""
        if self.is_refused(name):
            return "refused"
        return "up" if name in self._in_service else "back" if self.is_up(name) else "gone"

    def order(self, client: str) -> list[str]:
        """Those that answer, in the order in which they are asked about requests of `client`."""
        if len(self.names) == 1:
            return list(self._answers_since_s)
        living = [name for name in self._answers_since_s if not self.is_refused(name)]
        return sorted(preferred(client, living), key=lambda name: name not in self._in_service)

    def first(self, client: str) -> str | None:
        return next(iter(self.order(client)), None)
