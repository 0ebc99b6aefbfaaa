"""Which calls belong together: the interactions that are under way.

An interaction is all calls to the model behind one answer to a user (FairServe, section 2), named by (client, app, id).
Whoever cuts one in the middle wastes what its earlier calls cost, so a call of an interaction under way is never
refused. A call without an id is an interaction by itself.

    opened     by its first accepted call
    numbered   its calls count from 1, in the order in which they are accepted
    closed     when its last call has been answered; after `silence_s` without a call that waits or runs

Bounds, because what is open cannot be refused: after `most_calls` a call counts as a first one. Of a client's
interactions `most_open` are open at most, and of all clients' `most`; beyond, the longest silent one is closed, of this
client or of the one that has most. So a client that opens many closes its own.

Operations cost O(log clients); memory is O(open interactions).
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

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
    silent_s: float = 0.0
    """Since when none does."""


@dataclass(slots=True)
class _Client:
    """A client's open interactions: those with a call under way, and the silent ones, the longest silent first."""

    busy: OrderedDict[Interaction, Open] = field(default_factory=OrderedDict)
    silent: OrderedDict[Interaction, Open] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.busy) + len(self.silent)

    def get(self, name: Interaction) -> Open | None:
        return self.busy.get(name) or self.silent.get(name)

    def longest_silent(self) -> Interaction:
        """If none is silent, the one that has been busy for the longest time."""
        return next(iter(self.silent or self.busy))


class Interactions:
    """Those under way. ValueError for a bound below 1 and a silence that is no positive number of seconds."""

    def __init__(
        self,
        silence_s: float = SILENCE_S,
        *,
        most_calls: int = MOST_CALLS,
        most_open: int = MOST_OPEN,
        most: int = MOST,
    ) -> None:
        if not 0 < silence_s < inf:
            raise ValueError(f"silence_s must be a positive number of seconds, not {silence_s!r}")
        for name, bound in (("most_calls", most_calls), ("most_open", most_open), ("most", most)):
            if bound < 1:
                raise ValueError(f"{name} must be at least 1, not {bound!r}")
        self.silence_s, self.most_calls, self.most_open, self.most = silence_s, most_calls, most_open, most
        self._now_s = 0.0
        self._open = 0
        self._clients: dict[str, _Client] = {}
        self._largest: LazyHeap[str] = LazyHeap()
        """Clients by how many are open, most first."""
        self._silent: LazyHeap[str] = LazyHeap()
        """Clients with silent ones, by since when the longest silent one is."""

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back."""
        self._now_s = now_s
        while (client := self._silent.first()) is not None:
            if self._silent.key(client)[0] + self.silence_s > now_s:
                return
            self._close(next(iter(self._clients[client].silent)))

    def is_under_way(self, name: Interaction, begun: int = 0) -> bool:
        """Whether another call of it is none of the first ones. `begun` is how many calls of it the asker has seen
        accepted before: what this process has forgotten, it still knows."""
        return bool(name.id) and 0 < max(self.calls(name), begun) < self.most_calls

    def calls(self, name: Interaction) -> int:
        """How many of its calls were accepted; 0 if it is not open."""
        client = self._clients.get(name.client)
        open_ = client.get(name) if client is not None else None
        return 0 if open_ is None else open_.calls

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

    def _join(self, name: Interaction, begun: int) -> Open:
        """One more call of it is under way."""
        client = self._clients.setdefault(name.client, _Client())
        open_ = client.get(name)
        if open_ is None:
            self._make_room(client)
            self._clients[name.client] = client  # which its last one may have left
            open_ = Open(calls=begun)
            self._open += 1
        client.silent.pop(name, None)
        client.busy[name] = open_
        open_.under_way += 1
        self._seat(name.client, client)
        return open_

    def end(self, name: Interaction, *, is_answered: bool = False) -> None:
        """A call that was accepted waits and runs no more. `is_answered`: it was the last, and its user has the answer.
        Ignored if its interaction was closed meanwhile."""
        client = self._clients.get(name.client)
        open_ = client.busy.get(name) if client is not None else None
        if client is None or open_ is None:
            return
        open_.under_way -= 1
        if is_answered:
            self._close(name)
        elif not open_.under_way:
            open_.silent_s = self._now_s
            del client.busy[name]
            client.silent[name] = open_
            self._seat(name.client, client)

    def __len__(self) -> int:
        """How many are open."""
        return self._open

    def _make_room(self, client: _Client) -> None:
        if len(client) >= self.most_open:
            self._close(client.longest_silent())
        elif self._open >= self.most:
            largest = self._largest.first()
            assert largest is not None
            self._close(self._clients[largest].longest_silent())

    def _close(self, name: Interaction) -> None:
        client = self._clients[name.client]
        if client.silent.pop(name, None) is None:
            del client.busy[name]
        self._open -= 1
        if not len(client):
            del self._clients[name.client]
        self._seat(name.client, client)

    def _seat(self, name: str, client: _Client) -> None:
        """Put a client where `tick` and `_make_room` look for it."""
        if len(client):
            self._largest.put(name, (-len(client), name))
        else:
            self._largest.discard(name)
        first = next(iter(client.silent.values()), None)
        if first is not None:
            self._silent.put(name, (first.silent_s, name))
        else:
            self._silent.discard(name)
