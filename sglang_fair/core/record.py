"""The last requests of a replica, each with what it waited for: why a request took so long is looked up here.

    waits      how long it waited, by cause  (`waits`)
    overtaken  by how many that came later and were admitted in an earlier batch, and in how many batches
    evictions  how often it was taken back for a more urgent one, and how urgent that was  (`preemption`)
    counter    the policy's counter of its client when it came and when it was admitted, and the refills between
    service    when its prompt and its answer were computed, and how it ended

No other client is in it by name, and no text: others are numbers. Cost: O(log requests here) for a request, amortised,
O(what changed) for a pass. What a wait was made of is added up when it is looked up.
"""

from bisect import bisect, insort
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from sglang_fair.common.record import MOST_ENDED, MOST_NAME, Recent
from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener
from sglang_fair.core.policy import Policy
from sglang_fair.core.waits import FIRST, MEMORY, Clock, Waits

NS = 1_000_000_000

LEAST_NOTED = 64
"""Admissions after which each request that is here may note how many of them have overtaken it."""

Outcome = Literal["finished", "aborted", "refused"]
"""How a request ended: it was answered; it was given up; it could not wait here."""

AS_IS = (
    "id", "client", "outcome", "reason", "waiting_at_arrival", "running_at_arrival", "counter_at_arrival",
    "counter_at_admission",
)  # fmt: skip
"""What is shown of an entry without more ado."""

TOKENS = (
    "prompt_tokens", "max_output_tokens", "extend_tokens", "cached_tokens", "output_tokens", "retractions",
)  # fmt: skip
_numbers = attrgetter(*TOKENS)


@dataclass(slots=True, eq=False)
class Entry:
    """One request. Times are nanoseconds of the replica's clock."""

    id: str
    job: Job | None
    """While it is here. What is shown of it later is copied at its end."""
    client: str
    came_ns: int
    counter_at_arrival: float | None
    refills_at_arrival: int | None
    waiting_at_arrival: int
    running_at_arrival: int
    waits: tuple[Clock, ...] = ()
    """One, and one more for each time that it was taken back."""
    evicted_for: tuple[dict[str, Any], ...] = ()
    """For which requests, as it is shown."""
    overtaken: tuple[int, int] = (0, 0)
    """By requests, and in batches: until it was admitted, or last noted."""
    counter_at_admission: float | None = None
    refills: int | None = None
    admitted_ns: int | None = None
    computed_ns: int | None = None
    """When its prompt was computed."""
    ended_ns: int | None = None
    outcome: str | None = None
    reason: str = ""
    numbers: tuple[int, ...] = ()
    """`TOKENS` of the job, when it ended."""


class Record(Listener):
    """Notes what happens to requests. The server's own requests are not in it."""

    def __init__(self, policy: Policy, most: int = MOST_ENDED) -> None:
        self.waits = Waits()
        self._batch: list[int] = []
        self._admitted: list[int] = []
        self._latest: list[int] = []
        """`Job.arrival` of those in the batch that is being formed; since it was last noted what overtook each, of
        those that were admitted before, and of the latest of each batch: both sorted."""
        self._policy = policy
        self._here: dict[Job, Entry] = {}
        self._recent: Recent[Entry] = Recent(most)
        self._running = 0

    # ---- what happens

    def tick(self, now_s: float) -> None:
        self.waits.now_ns = max(self.waits.now_ns, round(now_s * NS))

    def arrive(self, job: Job) -> None:
        if not job.system:
            entry = self._here[job] = self._enter(job)
            entry.waits = (self.waits.begin(job.client),)

    def refused(self, job: Job, reason: str) -> None:
        if not job.system:
            self._end(self._enter(job), "refused", reason)

    def admit(self, job: Job) -> None:
        if (entry := self._here.get(job)) is None:
            return
        self.waits.end(entry.waits[-1])
        self._running += 1
        if entry.admitted_ns is None:
            entry.overtaken = self._overtaken(job, entry)
            self._batch.append(job.arrival)
            entry.counter_at_admission = self._policy.counter(job.client)
            entry.refills = self._refills_since(entry)
            entry.admitted_ns = self.waits.now_ns

    def computed(self, job: Job) -> None:
        entry = self._here.get(job)
        if entry is not None and entry.computed_ns is None:
            entry.computed_ns = self.waits.now_ns

    def retract(self, job: Job) -> None:
        if (entry := self._here.get(job)) is not None:
            self._running -= 1
            self.waits.stop(MEMORY)
            entry.waits += (self.waits.begin(FIRST),)

    def evict(self, job: Job, urgent: Job) -> None:
        if (entry := self._here.get(job)) is not None:
            self._running -= 1
            entry.waits += (self.waits.begin(job.client),)
            due_s = urgent.deadline_s
            evicted_for = {
                "same_client": urgent.client == job.client,
                "tier": urgent.tier,
                "slack_s": None if due_s is None else due_s - self.waits.now_ns / NS,
            }
            entry.evicted_for += (evicted_for,)

    def leave(self, job: Job) -> None:
        if (entry := self._here.pop(job, None)) is None:
            return
        if entry.admitted_ns is None:
            entry.overtaken = self._overtaken(job, entry)
            entry.refills = self._refills_since(entry)
        self.waits.end(entry.waits[-1])
        self._end(entry, "aborted")

    def finish(self, job: Job, outcome: str) -> None:
        if (entry := self._here.pop(job, None)) is not None:
            self._running -= 1
            self._end(entry, outcome)

    def hold(self, job: Job, cause: str) -> None:
        """This pass has passed `job`, which waits, over for a state of its own (`waits`)."""
        if (entry := self._here.get(job)) is not None:
            self.waits.hold(entry.waits[-1], cause)

    def end_pass(self, cause: str, turns: Mapping[str, bool]) -> None:
        if self._batch:
            self._end_batch()
        policy = self._policy
        self.waits.end_pass(cause, turns, policy.turn_cause if policy.has_turns() else None)

    # ---- what is read

    def find(self, request_id: str, client: str | None = None) -> list[dict[str, Any]]:
        """The requests that have or had this id, as `Recent.find`. JSON-ready, times in seconds."""
        return [self._shown(entry) for entry in self._recent.find(request_id, client)]

    def __len__(self) -> int:
        return len(self._recent)

    # ---- inside

    def _enter(self, job: Job) -> Entry:
        policy = self._policy
        entry = Entry(
            (job.attempt or job.id)[:MOST_NAME],
            job,
            job.client,
            self.waits.now_ns,
            policy.counter(job.client),
            policy.refills,
            self.waits.waiting,
            self._running,
        )
        self._recent.add(entry, entry.id)
        return entry

    def _end(self, entry: Entry, outcome: str, reason: str = "") -> None:
        assert entry.job is not None
        entry.numbers, entry.job = _numbers(entry.job), None
        entry.ended_ns, entry.outcome, entry.reason = self.waits.now_ns, outcome, reason
        self._recent.end(entry)

    def _overtaken(self, job: Job, entry: Entry) -> tuple[int, int]:
        """What has overtaken `job`, which waits, so far."""
        (requests, batches), number = entry.overtaken, job.arrival
        return (
            requests + len(self._admitted) - bisect(self._admitted, number),
            batches + len(self._latest) - bisect(self._latest, number),
        )

    def _end_batch(self) -> None:
        """What it admitted has overtaken those that came before and still wait."""
        for number in self._batch:
            insort(self._admitted, number)
        insort(self._latest, max(self._batch))
        self._batch.clear()
        if len(self._admitted) > max(LEAST_NOTED, 2 * len(self._here)):
            for job, entry in self._here.items():
                if entry.admitted_ns is None:
                    entry.overtaken = self._overtaken(job, entry)
            self._admitted.clear()
            self._latest.clear()

    def _refills_since(self, entry: Entry) -> int | None:
        now, before = self._policy.refills, entry.refills_at_arrival
        return None if now is None or before is None else now - before

    def _shown(self, entry: Entry) -> dict[str, Any]:
        now_ns, job = self.waits.now_ns, entry.job
        overtaken, refills = entry.overtaken, entry.refills
        if job is not None and entry.admitted_ns is None:
            overtaken, refills = self._overtaken(job, entry), self._refills_since(entry)
        by_wait = [self.waits.spent_ns(wait) for wait in entry.waits]
        by_cause = {cause: sum(spent.get(cause, 0) for spent in by_wait) for cause in set().union(*by_wait)}
        until_ns = now_ns if entry.ended_ns is None else entry.ended_ns
        prefill_s = decode_s = None
        if entry.admitted_ns is not None:
            computed_ns = until_ns if entry.computed_ns is None else entry.computed_ns
            prefill_s = (computed_ns - entry.admitted_ns) / NS
            decode_s = None if entry.computed_ns is None else (until_ns - computed_ns) / NS
        waits_now = bool(entry.waits) and entry.waits[-1].source is not None
        return {
            **{name: getattr(entry, name) for name in AS_IS},
            "state": "ended" if job is None else "waiting" if waits_now else "running",
            "came_s_ago": (now_ns - entry.came_ns) / NS,
            "waited_s": sum(by_cause.values()) / NS,
            "waited_again_s": sum(sum(spent.values()) for spent in by_wait[1:]) / NS,
            "waited_for_s": {
                cause: spent / NS
                for cause, spent in sorted(by_cause.items(), key=lambda one: (-one[1], one[0]))
            },
            "overtaken_by": overtaken[0],
            "overtaken_in_batches": overtaken[1],
            "refills": refills,
            "evicted_for": list(entry.evicted_for),
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            **dict(zip(TOKENS, entry.numbers if job is None else _numbers(job), strict=True)),
        }
