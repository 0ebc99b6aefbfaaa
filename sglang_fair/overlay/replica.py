"""SGLang's scheduler as `Admission` sees it: which request is tried next, which ones are taken back, what is shown.

Nothing is decided here, and everything runs on the scheduler's thread. The books are in `books`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import nlargest
from typing import Any

from sglang_fair.core import option_values
from sglang_fair.core.job import Job
from sglang_fair.core.preemption import Missing, Preemption, Runner
from sglang_fair.core.waits import BATCH, PROMPTS
from sglang_fair.overlay import tree_core
from sglang_fair.overlay.books import Books, guarded, is_over
from sglang_fair.overlay.waiting import take_out

MOST_SHOWN = 100
"""Clients whose part of the cache the status has."""


def largest(held: Mapping[str, float]) -> dict[str, int]:
    """The clients that hold most of the cache, with their tokens."""
    return {client: round(held[client]) for client in nlargest(MOST_SHOWN, held, key=held.__getitem__)}


class ReplicaFairness(Books):
    """The fairness of one SGLang scheduler."""

    _armed = False
    """The next iteration over the waiting queue is SGLang's admission loop."""
    _looks = 0
    """So many iterations come before it."""
    _passes = False
    """SGLang forms a batch."""
    _offered = False
    """It has been offered a request and has not tried it yet."""
    _stopped: str | None = None
    """Why it tries no other one."""
    _tried = False
    """The admission loop has begun."""
    _apart: list[Any] | None = None
    """SGLang's queue, while SGLang goes on without it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._expired = 0
        self.chosen: list[Any] = []
        """Those of the queue that SGLang has admitted in this pass."""

    @guarded
    def expired(self) -> list[Any]:
        """The requests that have waited for longer than they may, each once. None where SGLang's own policy decides,
        because ranks then have no clock in common, nor where requests join the queue with their prompts computed."""
        if not (self.orders and self._sees_all):
            return []
        found = [job.request for job in self._expiring.take(self.now_s)]
        self._expired += len(found)
        return found

    # ---- which request is next

    @guarded
    def begin_pass(self, waiting: list[Any], can_decode: Callable[[], bool] = lambda: False) -> None:
        """A batch is about to be formed from `waiting`; `can_decode` is that of `Admission.begin_pass`."""
        self._follow(waiting)
        self._passes, self._offered, self._stopped = True, False, None
        if self.orders:
            cached_tokens = self._tree_cache.evictable_size() + self._tree_cache.protected_size()
            self._admission.begin_pass(cached_tokens, can_decode)

    def only_waits(self) -> bool:
        """Nothing runs although requests wait: the policy lets none of them go yet."""
        return self.orders and len(self.queue) > 0 and not self.queue.running()

    @guarded
    def chunk_tokens(self, cut: Any) -> int | None:
        """Most prompt tokens of the batch that is formed, `cut` the request whose prompt was cut, if there is one;
        None: as many as SGLang will."""
        return self._admission.chunk_tokens(None if cut is None else self.job(cut))

    @guarded
    def goes_on(self, request: Any) -> bool:
        """Whether the next chunk of `request`, whose prompt was cut, is computed now."""
        job = self.job(request)
        return job is None or self._admission.goes_on(job)

    @guarded
    def chunk_of(self, request: Any, tokens: int) -> int | None:
        """Most prompt tokens for the next chunk of `request`, if that is less than the batch may have."""
        job = self.job(request)
        if job is None:
            return None
        most = self._admission.chunk_of(job, tokens, self._block(request, request.prefix_len))
        return most if most < tokens else None

    def arm(self, looks: int) -> None:
        """The next iteration over the waiting queue, behind so many `looks` at it, is SGLang's admission loop."""
        self._armed, self._looks = self.orders, looks
        self.chosen.clear()

    def disarm(self) -> bool:
        """The queue is iterated over. Whether it is by the admission loop."""
        if self._looks:
            self._looks -= 1
            return False
        armed, self._armed = self._armed, False
        self._tried = self._tried or armed
        return armed

    def take_out(self, queue: list[Any]) -> bool:
        """SGLang iterates over its `queue` once more: behind the admission loop, to leave out those that it admitted.
        Whether that is done: until `put_back` it goes on with what it would copy of nothing."""
        tried, self._tried = self._tried, False
        if not tried or not take_out(self.chosen, queue):
            return False
        self._apart = queue
        return True

    def put_back(self, queue: list[Any]) -> list[Any]:
        """The pass is over, and SGLang's queue is `queue`. Returns what is to be."""
        self.chosen.clear()
        self._armed = self._tried = False
        apart, self._apart = self._apart, None
        if apart is None:
            return queue
        apart.extend(queue)
        return apart

    def summed(self, queue: Any) -> Any:
        """What SGLang adds up in place of its `queue`."""
        queue = queue if self._apart is None else self._apart
        requests = len(queue)
        return self._waiting.summed(requests) if self.orders and requests == len(self.queue) else queue

    def offers(self) -> Iterator[Any]:
        """Candidates in the policy's order."""
        candidates = self._admission.candidates()
        while (request := self._next(candidates)) is not None:
            self._offered = True
            yield request
            self._offered = False

    @guarded
    def _next(self, candidates: Iterator[Job]) -> Any:
        job = next(candidates, None)
        return None if job is None else job.request

    @guarded
    def may_admit(self, request: Any) -> bool:
        """Whether `request`, which the engine has just matched against its cache, is to be admitted if it fits."""
        self._offered = False
        if not self.orders:
            return True
        job = self.job(request)
        return job is not None and self._admission.confirm(job, *self._matched(request))

    def stopped(self, cause: str) -> None:
        """The engine tries no other request in this pass, because of `cause`."""
        self._stopped = cause

    @guarded
    def end_pass(self, *, is_full: bool, was_full: bool) -> None:
        """The engine has formed a batch, or none. It tries none while its batch `is_full`: of requests, or for want
        of memory. If it came to that without a look at any of them, it is of requests."""
        passes, self._passes = self._passes, False
        if not passes:
            if is_full and not was_full:
                self._admission.end_pass(BATCH)
            return
        cause = self._stopped
        if cause is None and (self._offered or not self.orders):
            cause = BATCH if is_full else PROMPTS
        self._admission.end_pass(cause)

    # ---- which are taken back

    @property
    def preemption(self) -> Preemption | None:
        """None: the policy takes nothing back."""
        return self._admission.preemption if self.orders else None

    @guarded
    def urgent(self, waiting: list[Any]) -> Any:
        """Of those that wait, the request for which running ones may be taken back; None if it is not for such a one to
        be admitted next. It was just matched against the cache."""
        if self._admission.urgent() is None:
            return None
        self._follow(waiting)  # it may have left
        if (job := self._admission.urgent()) is None:
            return None
        self._admission.looked_up(job, *self._match(job))
        return job.request

    @guarded
    def to_take_back(
        self, request: Any, missing: Missing, running: Mapping[Any, tuple[float, bool]]
    ) -> list[Any]:
        """Which `running` requests to take back for `request`, which `urgent` returned, in this order. Of each
        there are the tokens of memory that there would be more without it, and whether it could go."""
        preemption, urgent = self.preemption, self.job(request)
        if preemption is None or urgent is None:
            return []
        runners = [
            Runner(job, tokens, can_go)
            for one, (tokens, can_go) in running.items()
            if (job := self.job(one)) is not None and not is_over(one)
        ]
        return [job.request for job in preemption.choose(urgent, missing, runners, self.now_s)]

    @guarded
    def took_back(self, requests: Iterable[Any], urgent: Any) -> None:
        """The engine took these back, and will queue them again when it has formed a batch."""
        job = self.job(urgent)
        assert job is not None
        for request in requests:
            if (taken := self.job(request)) is not None:
                self._taken_back[taken.id] = job

    @guarded
    def queued_again(self) -> None:
        """They all wait, or have ended."""
        self._taken_back.clear()

    def found_tokens(self, request: Any) -> int:
        """Tokens of its prompt that its first admission found in the cache."""
        job = self.job(request)
        return 0 if job is None else job.cached_tokens

    # ---- what is shown

    @property
    def waiting_tokens(self) -> int:
        """Of the requests that wait, those that are not cached, as SGLang counts them."""
        return self._waiting.uncached_tokens

    def metrics(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """What `GET /metrics` is made of, beside `status` of the same moment; JSON-ready."""
        names = "bound", "refills", "refused", "expired", "evictions", "corrections"
        same = {name: status[name] for name in names}
        return self._counts.read(self.queue) | same | {"waiting_tokens": self.waiting_tokens}

    def status(self, waiting: list[Any]) -> dict[str, Any]:
        """JSON-ready; SGLang's /server_info and our /fair carry it."""
        self.follow(waiting)
        policy = self.queue.policy
        return {
            "policy": self.policy_name,
            "config": {
                "quantum": getattr(policy, "quantum", None),
                "options": dict(option_values(policy)),
                "extend_weight": self.config.charges.extend_weight,
                "output_weight": self.config.charges.output_weight,
                "client_weights": dict(self.config.client_weights),
                "stall_ms": self._stall_ms,
                "target_tpot_ms": self._target_tpot_ms,
            },
            "refills": getattr(policy, "refills", None),
            "refused": self._refused,
            "expired": self._expired,
            "evictions": 0 if (preemption := self.preemption) is None else preemption.evictions,
            "cache_tokens": None if (of := tree_core.held(self._tree_cache)) is None else largest(of),
            "corrections": self.corrections,
            "steps": None if self._admission.steps is None else dict(self._admission.steps.status()),
            **self.queue.status(),
        }

    @guarded
    def explain(self, id: str, client: str | None) -> list[dict[str, Any]]:
        """The requests with this id that are remembered, of all clients if none is given; JSON-ready."""
        return self.record.find(id, client)
