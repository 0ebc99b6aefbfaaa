"""SGLang's waiting queue, without walks over it.

For each batch of prompts SGLang adds up the tokens of all who wait three times, for its log and its load reports, and
copies the queue without those that it has admitted: O(waiting requests). `Waiting` has the sums, kept as requests come,
are looked up in the cache and go, and finds what was admitted by its number: O(log waiting requests) for each, and one
move of what stands behind it in the list. Whatever does not agree with SGLang's list is left to SGLang, which walks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener

PLACE_ATTRIBUTE = "sglang_fair_place"
"""Attribute of SGLang's request: its latest place in the queue."""


@dataclass(slots=True, eq=False)
class Place:
    """What stands for a request in the sums; numbers rise with the order of SGLang's list."""

    number: int
    tokens: int
    matched: int


@dataclass(frozen=True, slots=True)
class Summed:
    """Stands for the queue where SGLang adds it up: as many as wait, and one of them that has all their tokens."""

    requests: int
    seqlen: int
    num_matched_prefix_tokens: int
    cache_request_handle: None = None

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator["Summed"]:
        return iter((self,) if self.requests else ())


class Waiting(Listener):
    """The tokens of the requests that wait, as SGLang counts them."""

    def __init__(self) -> None:
        self._numbers = 0
        self._tokens = self._matched = 0

    @property
    def uncached_tokens(self) -> int:
        return self._tokens - self._matched

    def summed(self, requests: int) -> Summed:
        """What SGLang is to add up in place of its queue of so many `requests`."""
        return Summed(requests, self._tokens, self._matched)

    def looked_up(self, request: Any) -> None:
        """The engine has searched its cache for `request`, which waits."""
        place = getattr(request, PLACE_ATTRIBUTE)
        self._matched += request.num_matched_prefix_tokens - place.matched
        place.matched = request.num_matched_prefix_tokens

    def arrive(self, job: Job) -> None:
        request: Any = job.request
        self._numbers += 1
        place = Place(self._numbers, request.seqlen, request.num_matched_prefix_tokens)
        setattr(request, PLACE_ATTRIBUTE, place)
        self._tokens += place.tokens
        self._matched += place.matched

    def retract(self, job: Job) -> None:
        self.arrive(job)

    def evict(self, job: Job, urgent: Job) -> None:
        self.arrive(job)

    def leave(self, job: Job) -> None:
        place = getattr(job.request, PLACE_ATTRIBUTE)
        self._tokens -= place.tokens
        self._matched -= place.matched

    def admit(self, job: Job) -> None:
        self.leave(job)


class Expiring(Listener):
    """The requests that wait and have not begun, by when they are dropped."""

    def __init__(self) -> None:
        self._jobs: LazyHeap[Job] = LazyHeap()

    def arrive(self, job: Job) -> None:
        if job.expires_s is not None:
            self._jobs.put(job, (job.expires_s, job.arrival))

    def leave(self, job: Job) -> None:
        self._jobs.discard(job)

    def admit(self, job: Job) -> None:
        self.leave(job)

    def take(self, now_s: float) -> list[Job]:
        """Those that have expired, each once."""
        found = []
        while (job := self._jobs.first()) is not None and self._jobs.key(job)[0] <= now_s:
            self._jobs.discard(job)
            found.append(job)
        return found


def take_out(requests: Iterable[Any], queue: list[Any]) -> bool:
    """Takes `requests`, which are in `queue`, out of it. False: one is not where it was put, and some are left."""
    for request in requests:
        at = bisect_left(queue, _number(request), key=_number)
        if at == len(queue) or queue[at] is not request:
            return False
        del queue[at]
    return True


def _number(request: Any) -> int:
    place: Place | None = getattr(request, PLACE_ATTRIBUTE, None)
    return 0 if place is None else place.number


class Candidates:
    """SGLang's waiting queue while a batch is formed. The admission loop iterates over it in the policy's order, which
    is decided one candidate at a time; to the filter behind it, it is empty where what was admitted is taken out
    already. Every other reader gets the list itself, uncopied."""

    def __init__(self, waiting: list[Any], fair: Any) -> None:
        self.waiting = waiting
        self._fair = fair

    def __iter__(self) -> Iterator[Any]:
        if self._fair.disarm():
            offers: Iterator[Any] = self._fair.offers()
            return offers
        return iter(() if self._fair.take_out(self.waiting) else self.waiting)

    def __len__(self) -> int:
        return len(self.waiting)

    def __getitem__(self, at: Any) -> Any:
        return self.waiting[at]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.waiting, name)
