"""The requests that wait: those that the placement holds, at most `MAX_WAITING`, until a worker is ready for one or
none is left, and suspects, until they are tried (`suspects`)."""

from collections import Counter
from collections.abc import Iterator, Mapping

from router.flights import State
from router.placement.contract import Request
from router.radix import Match
from router.shared_limit import SharedLimit
from router.swaps import Swaps
from router.workers import Worker

MAX_WAITING = 10_000
"""Requests of all clients together that may wait here; beyond, they are refused."""

STANDING_EVERY_S = 0.01
"""What stands before a request is recorded of one in so long."""


class Waiting:
    """A placement that holds no requests has only suspects wait."""

    def __init__(self, state: State, swaps: Swaps) -> None:
        self._placement = state.placement
        self.by_id: dict[str, tuple[Request, bytes]] = {}
        """Those that the placement holds, each with the peer that asked."""
        self.matches: dict[str, Match] = {}
        """What they match. Valid until the tree changes."""
        self.limit = SharedLimit(MAX_WAITING)
        self._state, self._swaps = state, swaps
        self._suspects, self._workers = state.suspects.waiting, state.workers
        self._kinds: Counter[tuple[str, tuple[str, ...]]] = Counter()
        """How many are for a model and exclude some workers."""
        self._offered: list[Worker] = []
        """The workers among which each has one that it may go to."""
        self._stood_s = float("-inf")
        """When it was last looked at what stands before a request that came."""

    def enter(self, request: Request, peer: bytes, match: Match) -> None:
        """The placement holds `request`, of which `limit` has counted its client's share."""
        self.by_id[request.id] = request, peer
        self._kinds[request.model, request.exclude] += 1
        self.matches[request.id] = match

    def asked(self, name: str) -> tuple[bytes, str, tuple[str, ...]] | None:
        """The peer, the model and the excluded workers of request `name`; None if it does not wait."""
        if (held := self.by_id.get(name)) is not None:
            return held[1], held[0].model, held[0].exclude
        if (suspect := self._suspects.get(name)) is not None:
            return suspect.peer, suspect.event.model, suspect.event.exclude
        return None

    def __contains__(self, name: str) -> bool:
        return name in self.by_id or name in self._suspects

    def has(self, name: str, peer: bytes) -> bool:
        asked = self.asked(name)
        return asked is not None and asked[0] == peer

    def of_peer(self, peer: bytes) -> list[str]:
        return [
            *(name for name, (_, asker) in self.by_id.items() if asker == peer),
            *(name for name, one in self._suspects.items() if one.peer == peer),
        ]

    def give_up(self, name: str, now_s: float) -> bool:
        """Request `name` leaves without a worker; False if it did not wait."""
        if name not in self.by_id:
            return self._suspects.pop(name, None) is not None
        request, _ = self._leave(name)
        self._placement.give_up(request)
        self._state.throttling.ended(name, now_s)
        self._state.counts["given up"] += 1
        return True

    def hopeless(self, now_s: float) -> list[tuple[Request, bytes]]:
        """Gives up what excludes every worker that is left."""
        if self._workers.taking is self._offered:
            return []
        self._offered = self._workers.taking
        kinds = {kind for kind in self._kinds if self._is_hopeless(*kind)}
        if not kinds:
            return []
        found = [one for one in self.by_id.values() if (one[0].model, one[0].exclude) in kinds]
        for request, _ in found:
            self.give_up(request.id, now_s)
        return found

    def ready(self, now_s: float) -> Iterator[tuple[Request, bytes, Worker, Match]]:
        """Those for which a worker is ready: each leaves, and is to be placed before the next."""
        taking = self._workers.taking

        def may(request: Request, worker: str) -> bool:
            pool = self._workers.by_name[worker].pool
            held = self._state.suspects.held(now_s)
            if worker in held and not held.issuperset(pool.names_taking):
                return False
            return worker not in request.exclude and self._workers.pool(request.model) is pool

        while self.by_id and (chosen := self._placement.next(taking, self._match, may, now_s)):
            request, name = chosen
            match = self._match(request)
            yield request, self._leave(request.id)[1], self._workers.by_name[name], match
            self.matches.clear()

    def standing(self, name: str, now_s: float) -> Mapping[str, object] | None:
        """Where a request that has come stands among those that wait. What is before it is looked at only if that was
        not just done for another one, because it takes as long as there are groups."""
        ahead = now_s - self._stood_s >= STANDING_EVERY_S
        self._stood_s = now_s if ahead else self._stood_s
        return self._placement.standing(name, now_s, ahead=ahead)

    def with_standing(self, placement: dict[str, object], now_s: float) -> dict[str, object]:
        """What is recorded of a request, and where it stands if it still waits."""
        name = str(placement["id"])
        if name not in self.by_id or not self._placement.plans:
            return placement
        return placement | {"stands": self._placement.standing(name, now_s)}

    def _is_hopeless(self, model: str, exclude: tuple[str, ...]) -> bool:
        """Whether no worker but those is left that has the model, or may come to have it."""
        taking = self._workers.pool(model).taking
        return all(one.name in exclude for one in taking) and not self._swaps.may_come(model, exclude)

    def _match(self, request: Request) -> Match:
        match = self.matches.get(request.id)
        if match is None:
            match = self.matches[request.id] = self._state.tree.match(request.tokens, request.namespace)
        return match

    def _leave(self, name: str) -> tuple[Request, bytes]:
        request, peer = self.by_id.pop(name)
        kind = request.model, request.exclude
        self._kinds[kind] -= 1
        if not self._kinds[kind]:
            del self._kinds[kind]
        self.limit.give(request.client)
        return request, peer
