"""The time by which a scheduler decides, the same on all its ranks.

With tensor, pipeline or context parallelism several processes schedule the same requests, each for itself, and must
decide the same in every iteration: ranks that form different batches wait for each other for ever. Their clocks differ,
by hours between machines. So one rank, the one that receives the requests, reads its clock once per iteration, and the
reading travels with the requests that SGLang gives to the others anyway. A scheduler of one rank reads its own.

    leading rank                            all ranks, in the same iteration
    requests, Reading(t) ── SGLang's way ──►  advance: now_s = t, the requests are processed

Ranks that share a waiting queue share a clock. With data-parallel attention each group has its own.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver


@dataclass(frozen=True, slots=True)
class Reading:
    """A reading of the leading rank's monotonic clock, on its way among the requests of one iteration."""

    now_s: float


class Clock:
    """`now_s` is what the leading rank's monotonic clock showed when this iteration began. It never goes back.

    `is_shared`: other ranks decide the same, so that the time comes as a `Reading`.
    """

    def __init__(self, *, is_shared: bool, read: Callable[[], float] = time.monotonic) -> None:
        self.is_shared = is_shared
        self.now_s = 0.0 if is_shared else read()
        self._read = read

    def reading(self) -> Reading:
        """What the leading rank sends along."""
        return Reading(self._read())

    def latest(self) -> float:
        """A reading for records, by which nothing is decided: a later one than `now_s`, where no other rank has to
        agree."""
        return self.now_s if self.is_shared else self._read()

    def advance(self, received: list[Any]) -> list[Any]:
        """An iteration begins with what was `received`; returns the requests in it."""
        if not self.is_shared:
            self.now_s = self._read()
            return received
        requests = []
        for each in received:
            if isinstance(each, Reading):
                self.now_s = max(self.now_s, each.now_s)
            else:
                requests.append(each)
        return requests


@dataclass(kw_only=True, slots=True, frozen=True)
class TimedReceiver(SchedulerRequestReceiver):
    """SGLang's receiver of requests on a rank of several. The leading one sends a reading with the requests, and while
    `is_busy`: an idle scheduler gets a new one with its next request."""

    clock: Clock
    leads: bool
    is_busy: Callable[[], bool]

    @classmethod
    def of(
        cls, receiver: SchedulerRequestReceiver, clock: Clock, *, leads: bool, is_busy: Callable[[], bool]
    ) -> "TimedReceiver":
        """The same receiver, timed."""
        given = {field.name: getattr(receiver, field.name) for field in fields(receiver)}
        return cls(**given, clock=clock, leads=leads, is_busy=is_busy)

    def _broadcast_reqs_across_ranks(
        self, recv_reqs: list[Any] | None, local_reqs: list[Any] | None = None
    ) -> list[Any]:
        """`local_reqs`, what the leading rank adds, reach the ranks that share its waiting queue and no others."""
        added: Iterable[Any] = local_reqs or ()
        if self.leads and (recv_reqs or local_reqs or self.is_busy()):
            added = (*added, self.clock.reading())
        received: list[Any] = SchedulerRequestReceiver._broadcast_reqs_across_ranks(
            self, recv_reqs, list(added)
        )
        return received
