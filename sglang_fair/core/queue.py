"""One replica's requests in order: who waits, who goes next, whose turn comes before every policy's.

    engine                              FairQueue                      policy             account
    a request came        ── arrive ──►  it waits                   ── arrive
    a batch is formed     ── begin_pass, next ─►  who goes next?    ── pick
      it fits             ── admit ───►  it runs                    ── leave           ── begin
      it does not         ── (stop) or hold
    it ended              ── finish ──►  it is gone                 ── idle            ── end
    memory ran out        ── retract ─►  it waits, first in line                       ── retract
    one is more urgent    ── evict ───►  it waits                   ── arrive          ── retract

Two kinds of requests go before all others, in order of arrival, and no policy knows of them: the server's own work,
and requests that were retracted because memory ran out, which no deficit may hold back. One that was taken back for a
more urgent one (`preemption`) waits as the policy says. What is computed and emitted between `admit` and `finish` is
reported to `account` directly. Which of those that wait would compute the same prefix is `admission`'s business.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice
from typing import Any

from sglang_fair.common.weights import Weights
from sglang_fair.core.account import Account
from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.payers import FIRST, Payers
from sglang_fair.core.policy import Policy


@dataclass(slots=True)
class Presence:
    """A client's requests here.

    `backlog` is a new number each time that the client begins to wait: a client that waits at two times with the same
    number was backlogged all the time between (the theorems' premise).
    """

    waiting: int = 0
    backlog: int = 0
    running: int = 0


_ABSENT = Presence()


class FairQueue:
    """Orders the waiting requests by `policy` and keeps its `account`. Single-threaded; the caller brings the clock."""

    def __init__(self, policy: Policy, cost: Cost | None = None, payers: Payers | None = None) -> None:
        self.policy = policy
        self._clients: dict[str, Presence] = {}
        policy.cost = cost or Linear()
        self.account = Account(policy, policy.cost, payers, self._clients, self._open_backlogs)
        self._jobs: dict[str, Job] = {}
        self._first: LazyHeap[Job] = LazyHeap()
        """Waiting requests that go before all others."""
        self._first_held: list[Job] = []
        self._arrivals = 0
        self._backlogs = 0
        self._lasting: dict[int, None] = {}
        """Numbers of the backlogs that last, the oldest first."""
        self.reweighed: list[Callable[[str], None]] = [policy.reweigh]
        """Called with each client whose weight has changed."""

    # ---- what waits

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back. Call it before `refuses` and `begin_pass`."""
        self.policy.tick(now_s)

    def refuses(self, job: Job) -> str | None:
        """Why a new request may not wait here, for its sender; None: it may, and `arrive` follows at once."""
        self._read_weight(job)
        return None if job.system else self.policy.refuses(job)

    def arrive(self, job: Job) -> None:
        """A request joined the queue. ValueError if its id is already here."""
        if job.id in self._jobs or job.id in self.account.running:
            raise ValueError(f"request {job.id} is already here")
        self._arrivals += 1
        job.arrival = self._arrivals
        self._jobs[job.id] = job
        if job.system:
            self._first.put(job, job.arrival)
            return
        self._wait(job.client)
        self._read_weight(job)
        self.policy.arrive(job)

    def leave(self, job_id: str) -> None:
        """A waiting request was aborted. An id that does not wait is ignored."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._stop_waiting(job)
            if job.repeating:
                self.account.settle(job)
            self._forget_if_gone(job.client)

    def rematch(self, job: Job) -> None:
        """`job.prefix_tokens` of a waiting request has changed."""
        if not self._is_first(job):
            self.policy.rematch(job)

    # ---- what clients are entitled to

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set clients' weights by hand; see `Account.set_weights`. A weight that came with requests stays."""
        self.account.set_weights(weights)
        for client in weights:
            self._reweighed(client)

    def _read_weight(self, job: Job) -> None:
        """The weight in the newest tenants' file holds for all of its client's requests."""
        if job.weight is None or job.system:
            return
        if self.account.tell_weight(job.client, job.weight, job.weight_version):
            self._reweighed(job.client)

    def _reweighed(self, client: str) -> None:
        for call in self.reweighed:
            call(client)

    # ---- what goes next

    def begin_pass(self) -> None:
        """The engine starts to form a batch: every waiting request may be picked again."""
        self.policy.release()
        for job in self._first_held:
            self._first.put(job, job.arrival)
        self._first_held.clear()

    def next(self) -> Job | None:
        """The request to try next; None if none should be added in this pass."""
        return self._first.first() or self.policy.pick()

    def hold(self, job: Job) -> None:
        """Pass `job`, which `next` returned, over until the next pass."""
        if job in self._first:
            self._first.discard(job)
            self._first_held.append(job)
        else:
            self.policy.hold(job)

    def set_aside(self, test: Callable[[Job], bool]) -> Sequence[str]:
        """While `test` of the request holds that is next by the policy, pass all of its client's over until the next
        pass, but not those that go before all others. Returns these clients."""
        return self.policy.set_aside(test)

    # ---- what runs

    def admit(
        self, job: Job, *, extend_tokens: int, cached_tokens: int, path: Sequence[Hashable] = ()
    ) -> None:
        """`job` is in the batch that runs next; the arguments are those of `Account.begin`. ValueError if it does
        not wait."""
        if job.id not in self._jobs:
            raise ValueError(f"request {job.id} does not wait")
        self._stop_waiting(job)
        if not job.system:
            presence = self._presence(job.client)
            presence.running += 1
            if presence.running == 1:
                self.policy.runs(job.client, True)
        self.account.begin(job, extend_tokens=extend_tokens, cached_tokens=cached_tokens, path=path)

    def finish(self, job_id: str) -> None:
        """A running request ended, by itself or by abort. An id that does not run is ignored."""
        job = self.account.running.get(job_id)
        if job is not None:
            self._stop_running(job)
            self.account.end(job)
            self._forget_if_gone(job.client)

    def retract(self, job: Job) -> None:
        """The engine took a running request back and will compute it again: it waits, first in line."""
        self._take_back(job)
        self._first.put(job, job.arrival)

    def evict(self, job: Job) -> None:
        """The engine took a running request, none of its own, back for a more urgent one: it waits by the policy."""
        self._take_back(job)
        self.policy.arrive(job)

    # ---- what is read

    def waiting(self) -> Iterable[Job]:
        """In order of arrival."""
        return sorted(self._jobs.values(), key=lambda job: job.arrival)

    def jobs(self) -> Iterable[Job]:
        """Those that wait, in no order."""
        return self._jobs.values()

    def presence(self, client: str) -> Presence:
        """What `client` has here. Not to be changed."""
        return self._clients.get(client, _ABSENT)

    def running(self) -> Iterable[Job]:
        """In order of admission."""
        return self.account.running.values()

    def find(self, job_id: str) -> Job | None:
        """The job with this id, waiting or running."""
        return self._jobs.get(job_id) or self.account.running.get(job_id)

    def is_waiting(self, job_id: str) -> bool:
        return job_id in self._jobs

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._jobs)

    def status(self, most: int = 1000) -> Mapping[str, Any]:
        """State for people and programs, JSON-ready; the `most` clients with the most service are listed."""
        account, ledger = self.account, self.account.ledger
        policy, weights = self.policy, self.policy.weights or Weights()
        accounts = ledger.accounts()
        busiest = nlargest(most, accounts, key=lambda name: accounts[name].service)
        names = dict.fromkeys([*busiest, *islice(self._clients, most)])
        clients = {}
        for name in names:
            usage, presence = ledger.usage(name), self._clients.get(name, Presence())
            clients[name] = {
                "counter": policy.counter(name),
                "weight": weights.of(name),
                **usage.shown(),
                "requests": usage.requests,
                "backlog": presence.backlog if presence.waiting else None,
                "waiting": presence.waiting,
                "running": presence.running,
            }
        return {
            "clients": clients,
            "totals": {**ledger.total.shown(), "waiting": len(self._jobs), "running": len(account.running)},
            "conservation": ledger.conservation(),
            "payer": FIRST if account.payers is None else account.payers.rule,
            "bound": account.recent_bound(),
            "bound_since_start": account.bound(),
            "largest_input_tokens": account.largest_input_tokens,
            "largest_owed_tokens": account.largest_owed_tokens,
        }

    # ---- inside

    def _wait(self, client: str) -> None:
        presence = self._presence(client)
        presence.waiting += 1
        if presence.waiting == 1:
            self._backlogs += 1
            presence.backlog = self._backlogs
            self._lasting[self._backlogs] = None

    def _open_backlogs(self) -> tuple[int, int]:
        """The number of the oldest backlog that lasts, one after the latest if there is none, and of the latest."""
        return next(iter(self._lasting), self._backlogs + 1), self._backlogs

    def _stop_waiting(self, job: Job) -> None:
        del self._jobs[job.id]
        if self._is_first(job):
            self._first.discard(job)
            if job in self._first_held:
                self._first_held.remove(job)
        else:
            self.policy.leave(job)
        if not job.system:
            presence = self._clients[job.client]
            presence.waiting -= 1
            if not presence.waiting:
                del self._lasting[presence.backlog]

    def _is_first(self, job: Job) -> bool:
        """It waits before all others."""
        return job.system or (job.repeating and (job in self._first or job in self._first_held))

    def _take_back(self, job: Job) -> None:
        self._stop_running(job)
        self.account.retract(job)
        self._jobs[job.id] = job
        if not job.system:
            self._wait(job.client)

    def _stop_running(self, job: Job) -> None:
        if not job.system:
            presence = self._clients[job.client]
            presence.running -= 1
            if not presence.running:
                self.policy.runs(job.client, False)

    def _presence(self, client: str) -> Presence:
        presence = self._clients.get(client)
        if presence is None:
            presence = self._clients[client] = Presence()
        return presence

    def _forget_if_gone(self, client: str) -> None:
        """Keep nothing of a client without a request here, and let the policy know that it is gone."""
        presence = self._clients.get(client)
        if presence is not None and not presence.waiting and not presence.running:
            del self._clients[client]
            self.policy.idle(client)
