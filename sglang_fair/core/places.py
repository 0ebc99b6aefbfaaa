"""Places among the requests that run: where room is short, a client that runs something leaves others what is theirs.

    room      all that could run when the engine last had no place for one more, less those that run
    theirs    of another client that waits: as many more as give it, with those that it runs, no more than the
              candidate's client has, by weight; if it waits for more than a place, no more than it usually runs either
    the rule  a candidate whose client runs something is passed over if what is others' takes all the room

Counts are kept as requests come and go: clients that wait for a place alone are sorted by the share that one more would
give them. So a candidate costs O(room), however many clients are here, and O(1) if another one was passed over just
before.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import exp, inf

from sglang_fair.common.weights import Weights
from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener
from sglang_fair.core.waits import BATCH, MEMORY

USUAL_S = 10.0
"""How many requests a client has running is averaged over about so long."""

ROUNDING = 1e-9
"""A client that has its share exactly is not above it by an error of rounding."""


@dataclass(slots=True)
class Holder:
    """A client with requests here."""

    came_s: float
    since_s: float
    requests: int = 0
    running: int = 0
    """Of them: those that were admitted."""
    weight: float = 1.0
    run_s: float = 0.0
    """Until `since_s`: seconds times requests running, those of long ago less and less."""
    level: float | None = None
    """The share that one more would give it, if it waits for room alone."""

    def usually(self, now_s: float) -> float:
        """How many it has running on average, lately, or since it came. While as many run as before, it approaches
        that number."""
        seconds = USUAL_S * (1 - exp((self.came_s - now_s) / USUAL_S))
        return self._run_s_until(now_s) / seconds if seconds else 0.0

    def run(self, more: int, now_s: float) -> None:
        """It has so many `more` running."""
        self.run_s = self._run_s_until(now_s)
        self.since_s = now_s
        self.running += more

    def _run_s_until(self, now_s: float) -> float:
        faded = exp((self.since_s - now_s) / USUAL_S)
        return self.run_s * faded + self.running * USUAL_S * (1 - faded)


class Places(Listener):
    """The server's own requests have no part in it. `weights` are the clients' shares; `has_turn`: whether a client was
    eligible when the last pass ended."""

    def __init__(self, weights: Weights | None, has_turn: Callable[[str], bool]) -> None:
        self._weights = weights or Weights()
        self._has_turn = has_turn
        self._now_s = 0.0
        self._all: float = inf
        """How many can run, by the last time that one more could not."""
        self._requests = 0
        self._running = 0
        self._here: dict[str, Holder] = {}
        self._stuck: set[str] = set()
        """Clients that the engine has passed over since it last admitted one of their requests."""
        self._levels: dict[float, dict[str, Holder]] = {}
        self._sorted: list[float] = []
        """Keys of `_levels`."""
        self._had_more: dict[str, Holder] = {}
        """All that usually have one more running than now, and others."""
        self._changed: set[str] = set()
        """Clients whose level may be another one."""
        self._crowded_from = inf
        """From so many requests by weight on, a client is crowded out, while nothing happens."""

    # ---- what happens

    def tick(self, now_s: float) -> None:
        self._now_s, self._crowded_from = now_s, inf

    def arrive(self, job: Job) -> None:
        if job.system:
            return
        holder = self._here.get(job.client)
        if holder is None:
            holder = self._here[job.client] = Holder(self._now_s, self._now_s)
        holder.requests += 1
        self._requests += 1
        self.reweigh(job.client)

    def leave(self, job: Job) -> None:
        if not job.system:
            self._gone(job.client)

    def admit(self, job: Job) -> None:
        if job.system:
            return
        self._stuck.discard(job.client)
        self._run(job.client, 1)
        self._all = max(self._all, self._running)

    def retract(self, job: Job) -> None:
        if job.system:
            return
        holder = self._run(job.client, -1)
        if holder.usually(self._now_s) >= holder.running + 0.99:
            self._had_more[job.client] = holder

    def evict(self, job: Job, urgent: Job) -> None:
        self.retract(job)

    def finish(self, job: Job, outcome: str) -> None:
        if not job.system:
            self.retract(job)
            self._gone(job.client)

    def end_pass(self, cause: str, turns: Mapping[str, bool]) -> None:
        if cause in (BATCH, MEMORY):  # there is no room for one more
            self._all = self._running
        self._changed.update(turns)
        self._crowded_from = inf

    def reweigh(self, client: str) -> None:
        """The weight of `client`, or something else that matters of it, may have changed."""
        self._changed.add(client)
        self._crowded_from = inf

    def pass_over(self, client: str) -> None:
        """The engine has passed a request of `client` over."""
        self._stuck.add(client)
        self.reweigh(client)

    # ---- the decision

    def crowds_out(self, job: Job) -> bool:
        """Whether `job`, which waits, may not be admitted now, because the places that are left are others'. Those that
        go before all others may."""
        if job.system or job.repeating or self._all > self._requests:
            return False
        holder = self._here[job.client]
        if not holder.running:
            return False
        if self._changed:
            for name in self._changed:
                self._sort(name)
            self._changed.clear()
        has = holder.running / holder.weight
        if has < self._crowded_from and self._are_others(has * (1 + ROUNDING)):
            self._crowded_from = has
        return has >= self._crowded_from

    def _are_others(self, most: float) -> bool:
        """Whether all places that are left would be others', if these had `most` requests each, by weight."""
        theirs, room = 0, self._all - self._running
        for level in self._sorted:
            if level > most * (1 + ROUNDING):
                break
            for one in self._levels[level].values():
                theirs += max(0, int(min(most * one.weight, one.requests)) - one.running)
                if theirs and theirs >= room:
                    return True
        for client, one in list(self._had_more.items()):
            usually = one.usually(self._now_s)
            if usually < one.running + 0.99:  # until one of its requests ends it will not have more
                del self._had_more[client]
            elif one.level is None:
                theirs += max(0, int(min(most * one.weight, one.requests, usually)) - one.running)
                if theirs and theirs >= room:
                    return True
        return False

    # ---- inside

    def _run(self, client: str, more: int) -> Holder:
        holder = self._here[client]
        holder.run(more, self._now_s)
        self._running += more
        self.reweigh(client)
        return holder

    def _gone(self, client: str) -> None:
        """One request of `client` less."""
        holder = self._here[client]
        holder.requests -= 1
        self._requests -= 1
        self._stuck.discard(client)
        self.reweigh(client)
        if not holder.requests:
            self._sort(client)
            self._had_more.pop(client, None)
            self._changed.discard(client)
            del self._here[client]

    def _sort(self, client: str) -> None:
        """Put `client` where it belongs among the levels."""
        if (holder := self._here.get(client)) is None:
            return
        holder.weight, level = self._weights.of(client), None
        if holder.requests > holder.running and client not in self._stuck and self._has_turn(client):
            level = (holder.running + 1) / holder.weight
        old, holder.level = holder.level, level
        if level == old:
            return
        if old is not None:
            del self._levels[old][client]
            if not self._levels[old]:
                del self._levels[old]
                del self._sorted[bisect_left(self._sorted, old)]
        if level is not None:
            if level not in self._levels:
                self._levels[level] = {}
                insort(self._sorted, level)
            self._levels[level][client] = holder
