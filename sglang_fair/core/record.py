"""The last requests of a replica, each with what it waited for: who asks why a request took so long finds it here.

    waits      how long it waited, by cause                                     (`waits`)
    overtakes  by how many later ones, in how many batches                      (`overtakes`)
    evictions  how often it was taken back for a more urgent one, and how urgent that was  (`preemption`)
    counter    the policy's counter of its client when it came and when it was admitted, and the refills between
    service    when its prompt and its answer were computed, and how it ended

Nobody else is in it by name, and no text: others are numbers. An id may be anything, and come again: whoever looks one
up gets all requests that had it, the latest first, and says for which client it asks.

Bounded: those that are here, and the last `most` of those that are not, ids cut at `MOST_ID`. Cost: O(log waiting) for
a request, O(what changed) for a pass. What a wait was made of is added up when somebody asks.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from sglang_fair.core.job import Job
from sglang_fair.core.overtakes import Overtaken, Overtakes
from sglang_fair.core.policy import Policy
from sglang_fair.core.waits import MEMORY, Wait, Waits

MOST_ENDED = 4096
"""Requests that are remembered after their end."""

MOST_ID = 128
"""Characters of an id. Gateways make shorter ones."""

MOST_FOUND = 16
"""Requests of one id that are shown."""

NS = 1_000_000_000

Outcome = Literal["finished", "aborted", "refused"]
"""How a request ended: it was answered; somebody gave it up; it could not wait here."""


class EvictedFor(NamedTuple):
    """What is told of the one for whom a request was taken back."""

    same_client: bool
    tier: int
    slack_s: float | None
    """What was left until it was due."""


@dataclass(slots=True, eq=False)
class Entry:
    """One request. Times are nanoseconds of the replica's clock."""

    id: str
    job: Job | None
    """While it is here. What is to be known of it later is copied at its end."""
    client: str
    came_ns: int
    counter_at_arrival: float | None
    refills_at_arrival: int | None
    waiting_at_arrival: int
    running_at_arrival: int
    waits: tuple[Wait, ...] = ()
    """One, and one more for each time that it was taken back."""
    before: "Entry | None" = None
    after: "Entry | None" = None
    """Those that have its id too."""
    overtaken: Overtaken | None = None
    counter_at_admission: float | None = None
    refills: int | None = None
    admitted_ns: int | None = None
    computed_ns: int | None = None
    """When its prompt was computed."""
    ended_ns: int | None = None
    outcome: Outcome | None = None
    reason: str = ""
    numbers: tuple[int, ...] = ()
    """Of the job, when it ended."""


_NUMBERS = (
    "prompt_tokens",
    "max_output_tokens",
    "extend_tokens",
    "cached_tokens",
    "output_tokens",
    "retractions",
)


_numbers: Callable[[Job], tuple[int, ...]] = attrgetter(*_NUMBERS)


class Record:
    """Is told what happens to requests, and tells it again. The server's own requests are not in it."""

    def __init__(self, policy: Policy, most: int = MOST_ENDED) -> None:
        self.waits = Waits()
        self._overtakes: Overtakes[Job] = Overtakes()
        self._policy = policy
        self._most = most
        self._here: dict[Job, Entry] = {}
        self._ended: deque[Entry] = deque()
        self._by_id: dict[str, Entry] = {}
        """The latest of each id."""
        self._evicted_for: dict[Entry, tuple[EvictedFor, ...]] = {}
        """For whom requests were taken back; few were."""
        self._running = 0

    # ---- what happens

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back."""
        self.waits.now_ns = max(self.waits.now_ns, round(now_s * NS))

    def arrive(self, job: Job) -> None:
        """`job` waits; the policy knows it."""
        if job.system:
            return
        entry = self._enter(job)
        entry.waits = (self.waits.begin(job),)
        self._overtakes.arrive(job)
        self._here[job] = entry

    def refused(self, job: Job, reason: str) -> None:
        """`job` may not wait here."""
        if not job.system:
            self._end(self._enter(job), "refused", reason)

    def admit(self, job: Job) -> None:
        """`job` is in the batch that is formed; nothing was charged for that yet."""
        entry = self._here.get(job)
        if entry is None:
            return
        self.waits.end(job)
        self._running += 1
        if entry.admitted_ns is None:
            entry.overtaken = self._overtakes.admit(job)
            entry.counter_at_admission = self._policy.counter(job.client)
            entry.refills = self._refills_since(entry)
            entry.admitted_ns = self.waits.now_ns

    def computed(self, job: Job) -> None:
        """The prompt of `job` is computed."""
        entry = self._here.get(job)
        if entry is not None and entry.computed_ns is None:
            entry.computed_ns = self.waits.now_ns

    def retract(self, job: Job) -> None:
        """`job` was taken back and waits again, before all others."""
        entry = self._here.get(job)
        if entry is not None:
            self._running -= 1
            self.waits.stop(MEMORY)
            entry.waits += (self.waits.begin(job, first=True),)

    def evict(self, job: Job, urgent: Job) -> None:
        """`job` was taken back for `urgent`, and waits again as others of its client do."""
        entry = self._here.get(job)
        if entry is None:
            return
        self._running -= 1
        entry.waits += (self.waits.begin(job),)
        due_s = urgent.deadline_s
        slack_s = None if due_s is None else due_s - self.waits.now_ns / NS
        one = EvictedFor(urgent.client == job.client, urgent.tier, slack_s)
        self._evicted_for[entry] = (*self._evicted_for.get(entry, ()), one)

    def leave(self, job: Job) -> None:
        """`job`, which waited, was given up."""
        entry = self._here.pop(job, None)
        if entry is None:
            return
        if entry.admitted_ns is None:
            entry.overtaken = self._overtakes.of(job)
            entry.refills = self._refills_since(entry)
            self._overtakes.leave(job)
        self.waits.end(job)
        self._end(entry, "aborted")

    def finish(self, job: Job, outcome: Outcome) -> None:
        """`job`, which ran, has ended."""
        entry = self._here.pop(job, None)
        if entry is not None:
            self._running -= 1
            self._end(entry, outcome)

    def end_pass(self, cause: str) -> None:
        """A pass is over, and nobody else was admitted because of `cause` (`waits`)."""
        self._overtakes.end_batch()
        policy = self._policy
        self.waits.end_pass(cause, policy.turns(), policy.turn_cause if policy.has_turns() else None)

    # ---- who asks

    def find(self, request_id: str, client: str | None = None) -> list[dict[str, Any]]:
        """The requests that have or had this id, the latest first, `MOST_FOUND` at most; of `client` only, if one is
        given. JSON-ready, times in seconds."""
        found = (entry for entry in self._same(request_id[:MOST_ID]) if client in (None, entry.client))
        return [self._shown(entry) for entry in islice(found, MOST_FOUND)]

    def __len__(self) -> int:
        return len(self._here) + len(self._ended)

    # ---- inside

    def _same(self, request_id: str) -> Iterator[Entry]:
        entry = self._by_id.get(request_id)
        while entry is not None:
            yield entry
            entry = entry.before

    def _enter(self, job: Job) -> Entry:
        policy = self._policy
        entry = Entry(
            (job.attempt or job.id)[:MOST_ID],
            job,
            job.client,
            self.waits.now_ns,
            policy.counter(job.client),
            policy.refills,
            len(self.waits),
            self._running,
        )
        if (before := self._by_id.get(entry.id)) is not None:
            entry.before, before.after = before, entry
        self._by_id[entry.id] = entry
        return entry

    def _end(self, entry: Entry, outcome: Outcome, reason: str = "") -> None:
        assert entry.job is not None
        entry.numbers, entry.job = _numbers(entry.job), None
        entry.ended_ns, entry.outcome, entry.reason = self.waits.now_ns, outcome, reason
        self._ended.append(entry)
        if len(self._ended) > self._most:
            self._forget(self._ended.popleft())

    def _refills_since(self, entry: Entry) -> int | None:
        now, before = self._policy.refills, entry.refills_at_arrival
        return None if now is None or before is None else now - before

    def _forget(self, entry: Entry) -> None:
        self._evicted_for.pop(entry, None)
        before, after = entry.before, entry.after
        if before is not None:
            before.after = after
        if after is not None:
            after.before = before
        elif before is not None:
            self._by_id[entry.id] = before
        else:
            del self._by_id[entry.id]
        entry.before = entry.after = None

    def _shown(self, entry: Entry) -> dict[str, Any]:
        now_ns, job = self.waits.now_ns, entry.job
        overtaken, refills = entry.overtaken or Overtaken(0, 0), entry.refills
        if job is not None and entry.admitted_ns is None:
            overtaken = self._overtakes.of(job)
            refills = self._refills_since(entry)
        waited_ns, by_cause, again_ns = 0, dict[str, int](), 0
        for number, wait in enumerate(entry.waits):
            now = self.waits.stamp(wait) if wait.ended is None else None
            spent_ns = wait.total(now)
            waited_ns += spent_ns
            again_ns += spent_ns if number else 0
            for cause, spent in wait.by_cause(now).items():
                by_cause[cause] = by_cause.get(cause, 0) + spent
        until_ns = now_ns if entry.ended_ns is None else entry.ended_ns
        prefill_ns = decode_ns = None
        if entry.admitted_ns is not None:
            computed_ns = until_ns if entry.computed_ns is None else entry.computed_ns
            prefill_ns = computed_ns - entry.admitted_ns
            if entry.computed_ns is not None:
                decode_ns = until_ns - entry.computed_ns
        return {
            "id": entry.id,
            "client": entry.client,
            "state": "ended" if job is None else "waiting" if _waits(entry) else "running",
            "outcome": entry.outcome,
            "reason": entry.reason,
            "came_s_ago": (now_ns - entry.came_ns) / NS,
            "waiting_at_arrival": entry.waiting_at_arrival,
            "running_at_arrival": entry.running_at_arrival,
            "waited_s": waited_ns / NS,
            "waited_again_s": again_ns / NS,
            "waited_for_s": {cause: spent / NS for cause, spent in sorted(by_cause.items(), key=_longest)},
            "overtaken_by": overtaken.requests,
            "overtaken_in_batches": overtaken.batches,
            "counter_at_arrival": entry.counter_at_arrival,
            "counter_at_admission": entry.counter_at_admission,
            "refills": refills,
            "evicted_for": [one._asdict() for one in self._evicted_for.get(entry, ())],
            "prefill_s": _seconds(prefill_ns),
            "decode_s": _seconds(decode_ns),
            **dict(zip(_NUMBERS, entry.numbers if job is None else _numbers(job), strict=True)),
        }


def _waits(entry: Entry) -> bool:
    return bool(entry.waits) and entry.waits[-1].ended is None


def _longest(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


def _seconds(ns: int | None) -> float | None:
    return None if ns is None else ns / NS
