"""Which calls belong together: the interactions that are under way.

An interaction is all calls to the model behind one answer to a user (FairServe, section 2), named by (client, app, id).
To cut one in the middle wastes what its earlier calls cost, so a call of an interaction under way is never
refused. A call without an id is an interaction by itself.

    opened     by its first accepted call
    numbered   its calls count from 1, in the order in which they are accepted
    due        all of them, when its first one is
    closed     when its last call has been answered; after `silence_s` without a call that waits or runs

Bounds, because what is open cannot be refused: after `most_calls` a call counts as a first one. Of a client's
interactions `most_open` are open at most, and of all clients' `most`; beyond, the longest silent one is closed, of this
client or of the one that has most. So a client that opens many closes its own.

Operations cost O(log clients), amortised, and O(`most_open`) if one is closed to make room; memory is O(open
interactions).
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from sglang_fair.common.deadlines import Promise
from sglang_fair.core.heap import LazyHeap

SILENCE_S = 60.0
MOST_CALLS = 50
MOST_OPEN = 200
MOST = 100_000


class Interaction(NamedTuple):
    """The name of one; `id` "" is that of a call by itself, which is not kept."""

    client: str
    app: str
    id: str


@dataclass(slots=True)
class Open:
    """One under way: how many of its calls were accepted, and how many of these wait or run."""

    calls: int = 0
    under_way: int = 0
    promise: Promise | None = None
    """What was promised for its first call."""


class Interactions:
    """Those under way."""

    def __init__(
        self,
        silence_s: float = SILENCE_S,
        *,
        most_calls: int = MOST_CALLS,
        most_open: int = MOST_OPEN,
        most: int = MOST,
    ) -> None:
        self.silence_s, self.most_calls, self.most_open, self.most = silence_s, most_calls, most_open, most
        self._now_s = 0.0
        self._open = 0
        self._clients: dict[str, OrderedDict[Interaction, Open]] = {}
        """The open ones of each client, in order of when each fell silent, or busy."""
        self._largest: LazyHeap[str] = LazyHeap()
        """Clients by how many are open, most first."""
        self._silent: OrderedDict[Interaction, float] = OrderedDict()
        """Since when those are of which no call waits or runs, the longest silent first."""

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back."""
        self._now_s = now_s
        while self._silent and next(iter(self._silent.values())) + self.silence_s <= now_s:
            self._close(next(iter(self._silent)))

    def calls(self, name: Interaction) -> int:
        """How many of its calls were accepted; 0 if it is not open."""
        open_ = self._find(name)
        return 0 if open_ is None else open_.calls

    def go_on(self, name: Interaction, begun: int = 0) -> int:
        """A call of it came. If it is under way, the call is none of the first ones and is accepted: its number. Else
        0, and nothing changes. `begun`, if it is not open here: how many calls the gateway has seen accepted."""
        open_ = self._find(name)
        calls = begun if open_ is None else open_.calls
        if not 0 < calls < self.most_calls or not name.id:
            return 0
        open_ = self._join(name, begun)
        open_.calls += 1
        return open_.calls

    def accept(self, name: Interaction, begun: int = 0) -> int:
        """A call of it was accepted; its number, from 1. After `most_calls` it begins anew."""
        if not name.id:
            return 1
        open_ = self._join(name, begun)
        open_.calls = open_.calls + 1 if open_.calls < self.most_calls else 1
        return open_.calls

    def again(self, name: Interaction, begun: int = 1) -> int:
        """A call that was accepted before waits or runs once more, at another replica say; it is not counted again.
        How many were accepted."""
        return self._join(name, max(1, begun)).calls if name.id else 1

    def promise(self, name: Interaction, promise: Promise) -> Promise:
        """What holds for a call that was accepted: what was promised for the first one, which `promise` is if none came
        before it."""
        open_ = self._find(name)
        if open_ is None:
            return promise
        if open_.promise is None or open_.calls <= 1:
            open_.promise = promise
        return open_.promise

    def promised(self, name: Interaction) -> Promise | None:
        """What would hold for another call of it; None: it would be the first, or nothing was promised."""
        open_ = self._find(name)
        return None if open_ is None or open_.calls >= self.most_calls else open_.promise

    def accepted(self, name: Interaction, number: int) -> None:
        """Another process has accepted a call of it as number `number`; the call waits or runs."""
        if name.id:
            self._join(name, 0).calls = number

    def resume(self, name: Interaction, calls: int) -> None:
        """It was open in another process, where `calls` of its calls were accepted: it is open here, and silent as of
        now. Nothing is closed for it: without room it is not taken up."""
        open_ = self._find(name)
        has_room = self._open < self.most and len(self._clients.get(name.client, ())) < self.most_open
        if open_ is not None:
            open_.calls = max(open_.calls, calls)
        elif has_room and name.id and calls > 0:
            self._opened(name, calls)
            self.end(name)

    def __iter__(self) -> Iterator[tuple[Interaction, int]]:
        """Those that are open, and how many of their calls were accepted; of each client the latest last."""
        for client in self._clients.values():
            for name, open_ in client.items():
                yield name, open_.calls

    def end(self, name: Interaction, *, is_answered: bool = False) -> None:
        """A call that was accepted waits and runs no more. `is_answered`: it was the last, and its user has the answer.
        Ignored if its interaction was closed meanwhile."""
        open_ = self._find(name)
        if open_ is None or not open_.under_way:
            return
        open_.under_way -= 1
        if is_answered:
            self._close(name)
        elif not open_.under_way:
            self._silent[name] = self._now_s
            self._clients[name.client].move_to_end(name)

    def __len__(self) -> int:
        """How many are open."""
        return self._open

    def _find(self, name: Interaction) -> Open | None:
        client = self._clients.get(name.client)
        return None if client is None else client.get(name)

    def _join(self, name: Interaction, begun: int) -> Open:
        """One more call of it is under way."""
        open_ = self._find(name)
        if open_ is None:
            return self._opened(name, begun)
        if not open_.under_way:
            del self._silent[name]
            self._clients[name.client].move_to_end(name)
        open_.under_way += 1
        return open_

    def _opened(self, name: Interaction, begun: int) -> Open:
        self._make_room(name.client)
        client = self._clients.setdefault(name.client, OrderedDict())
        open_ = client[name] = Open(begun, under_way=1)
        self._open += 1
        self._largest.put(name.client, (-len(client), name.client))
        return open_

    def _make_room(self, client: str) -> None:
        """For one more of `client`."""
        if len(self._clients.get(client, ())) >= self.most_open:
            self._close(self._longest_silent(client))
        elif self._open >= self.most:
            largest = self._largest.first()
            assert largest is not None
            self._close(self._longest_silent(largest))

    def _longest_silent(self, client: str) -> Interaction:
        """If none is silent, the one that has been busy for the longest time."""
        names = self._clients[client]
        return next((name for name, open_ in names.items() if not open_.under_way), next(iter(names)))

    def _close(self, name: Interaction) -> None:
        client = self._clients[name.client]
        del client[name]
        self._silent.pop(name, None)
        self._open -= 1
        if client:
            self._largest.put(name.client, (-len(client), name.client))
        else:
            del self._clients[name.client]
            self._largest.discard(name.client)
