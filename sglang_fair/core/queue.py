"""One replica's waiting queue and books, for any policy and any engine.

    engine                              FairQueue                      policy
    a request came        ── arrive ──►  a Job waits               ── arrive
    a batch is formed     ── begin_pass, next ─►  who goes next?   ── pick
      it fits             ── admit ───►  charge its extend tokens  ── leave, charge
      it does not         ── (stop) or hold
    a later chunk         ── extend ──►  charge                    ── charge
    tokens came out       ── emit ────►  charge                    ── charge
    it ended              ── finish ──►  refund what was only predicted
    memory ran out        ── retract ─►  waits again, first in line

What a policy need not know is here: the cost function, the ledger, how predicted outputs are charged ahead
(the ledger has only what was really given), retracted requests (they go first and are never held back by a
deficit, and what the server recomputes for them is on the system account), who pays for a prefix that clients share
(an admission moves units between those who use it), and requests whose uncached prefix
another one is computing right now (they wait for it: one step later the prefix is a cache hit; where it is not,
because the cache did not keep it, they do not wait again).
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM, Ledger
from sglang_fair.core.payers import FIRST, Payers, Swing
from sglang_fair.core.policy import Policy

DEFERRALS_PER_PASS = 64
"""Requests that are passed over in one pass because their prefix is being computed; one more ends the pass. They
are the many that share a new prefix, and once it is cached all of them can go."""


@dataclass(slots=True)
class Presence:
    """A client's requests here, and the output that its running ones may still make.

    `backlog` is another number each time that the client begins to wait: a client that waits at two times
    with the same number was backlogged all the time between (the theorems' premise).
    """

    waiting: int = 0
    backlog: int = 0
    running: int = 0
    owed_tokens: int = 0


@dataclass(slots=True, eq=False)
class Computation:
    """`job`'s prompt is being computed from some block on, in one step of the engine."""

    job: Job


@dataclass
class FairQueue:
    """Owns the jobs and the ledger; asks `policy` for order. Single-threaded; the caller brings the clock."""

    policy: Policy
    cost: Cost = field(default_factory=Linear)
    ledger: Ledger = field(default_factory=Ledger)
    payers: Payers | None = None
    """Who pays for a prefix that clients share. None: whoever computes it, and nothing is transferred."""

    largest_input_tokens: int = field(default=0, init=False)
    """Most extend tokens that one request has been charged: L_input of the theorems, as seen."""
    largest_prompt_tokens: int = field(default=0, init=False)
    """The same with the cached tokens in front of them: a dear position is dear behind a cached prefix too."""
    dearest_input_units: float = field(default=0.0, init=False)
    """What the dearest prompt has cost."""
    largest_output_tokens: int = field(default=0, init=False)
    """Longest output that one request may make, as seen."""
    largest_owed_tokens: int = field(default=0, init=False)
    """Most output tokens owed at once to one client's running requests: M of the theorems, as seen."""

    _jobs: dict[str, Job] = field(default_factory=dict, init=False, repr=False)
    _running: dict[str, Job] = field(default_factory=dict, init=False, repr=False)
    _first: LazyHeap[Job] = field(default_factory=LazyHeap, init=False, repr=False)
    _first_held: list[Job] = field(default_factory=list, init=False, repr=False)
    _computing: dict[Hashable, Computation] = field(default_factory=dict, init=False, repr=False)
    _deferrals: int = field(default=0, init=False, repr=False)
    _clients: dict[str, Presence] = field(default_factory=dict, init=False, repr=False)
    _swing: Swing = field(default_factory=Swing, init=False, repr=False)
    _arrivals: int = field(default=0, init=False, repr=False)
    _backlogs: int = field(default=0, init=False, repr=False)

    # ---- the queue

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back. To be said before `refuses` and `begin_pass`."""
        self.policy.tick(now_s)

    def refuses(self, job: Job) -> str | None:
        """Why a new request may not wait here, for its sender; None: it may, and `arrive` follows at once."""
        return None if job.system else self.policy.refuses(job)

    def arrive(self, job: Job) -> None:
        """A request joined the queue. ValueError when its id is already here."""
        if job.id in self._jobs or job.id in self._running:
            raise ValueError(f"request {job.id} is already here")
        self._arrivals += 1
        job.arrival = self._arrivals
        self._jobs[job.id] = job
        if job.system:
            self._first.put(job, job.arrival)
            return
        self._wait(job)
        self.policy.arrive(job)

    def leave(self, job_id: str) -> None:
        """A waiting request was aborted. Nothing happens for an id that does not wait."""
        job = self._jobs.get(job_id)
        if job is not None:
            self._stop_waiting(job)
            if job.repeating:
                self._settle(job)
            self._forget_if_idle(job)

    def rematch(self, job: Job, prefix_tokens: int, block: Hashable | None) -> None:
        """The cached prefix of a waiting request was looked up again."""
        changed = prefix_tokens != job.prefix_tokens
        job.prefix_tokens, job.block = prefix_tokens, block
        if changed and not (job.system or job.repeating):
            self.policy.rematch(job)

    def begin_pass(self) -> None:
        """The engine starts to form a batch: every waiting request may be picked again."""
        self.policy.release()
        for job in self._first_held:
            self._first.put(job, job.arrival)
        self._first_held.clear()
        self._deferrals = 0

    def next(self) -> Job | None:
        """The request to try next; None when nobody should be added in this pass."""
        while self._deferrals < DEFERRALS_PER_PASS:
            job = self._first.first() or self.policy.pick()
            if job is None or not self.is_being_computed(job):
                return job
            self.defer(job)
        return None

    def hold(self, job: Job) -> None:
        """The engine passes `job`, which `next` returned, over until the next pass."""
        if job in self._first:
            self._first.discard(job)
            self._first_held.append(job)
        else:
            self.policy.hold(job)

    def is_being_computed(self, job: Job) -> bool:
        """Another request's prefill, not finished yet, starts with the tokens that `job` needs next, and there is
        reason to think that the cache will keep them: if it has waited before, that has lengthened its prefix."""
        if job.block is None or not self.policy.waits_for_prefixes:
            return False
        computation = self._computing.get(job.block)
        if computation is None or computation.job is job:
            return False
        return computation is job.waited_for or job.prefix_tokens > job.waited_at_tokens

    def defer(self, job: Job) -> None:
        """Hold `job`, which `next` chose or returned, because its prefix is being computed."""
        if job.block is not None and (computation := self._computing.get(job.block)) is not job.waited_for:
            job.waited_for, job.waited_at_tokens = computation, job.prefix_tokens
        self._deferrals += 1
        self.hold(job)

    # ---- service

    def admit(self, job: Job, *, extend_tokens: int, cached_tokens: int) -> None:
        """`job` is in the batch that runs next; the engine computes `extend_tokens` of its prompt now."""
        if job.id not in self._jobs:
            raise ValueError(f"request {job.id} does not wait")
        self._stop_waiting(job)
        self._running[job.id] = job
        if not job.system:
            presence = self._presence(job.client)
            presence.running += 1
            presence.owed_tokens += job.max_output_tokens - job.output_tokens
            self.largest_output_tokens = max(self.largest_output_tokens, job.max_output_tokens)
            self.largest_owed_tokens = max(self.largest_owed_tokens, presence.owed_tokens)
        repeated = job.repeating
        own = not (repeated or job.system)
        predictor, predicted = self.policy.predictor, 0
        if predictor is not None and own:
            predicted = min(job.max_output_tokens, max(0, round(predictor.predict(job))))
        job.cached_tokens += 0 if repeated else cached_tokens
        self.ledger.record(
            SYSTEM if job.system or repeated else job.client,
            cached=0 if repeated else cached_tokens,
            requests=0 if repeated else 1,
        )
        job.reached_tokens = cached_tokens
        if own:
            self._share(job, cached_tokens)
        self._compute(job, extend_tokens, job.block, predicted)
        if own:
            self.policy.admitted(job, self.dearest_input_units, self._dearest_output_units())

    def extend(self, job: Job, tokens: int, block: Hashable | None = None) -> None:
        """The engine computes `tokens` more of an admitted prompt; `block` is the first of them."""
        self._compute(job, tokens, block)

    def prefilled(self, job: Job) -> None:
        """What the engine was computing of the prompt is in the cache now."""
        self._stop_computing(job)

    def emit(self, job: Job, tokens: int) -> None:
        """The engine emitted `tokens` output tokens.

        Tokens past the request's own limit are the server's work: SGLang runs the prompt of a request for
        several samples once ahead of them, to warm the cache, and throws away the one token that comes out.
        """
        if job.id not in self._running:
            raise ValueError(f"request {job.id} does not run")
        if tokens <= 0:
            return
        asked_for = 0 if job.system else min(tokens, max(0, job.max_output_tokens - job.output_tokens))
        if tokens > asked_for:
            job.unasked_tokens += tokens - asked_for
            self.ledger.record(SYSTEM, output=tokens - asked_for)
        if asked_for:
            self._charge(job, output=asked_for)
            self._presence(job.client).owed_tokens -= asked_for

    def emit_each(self, jobs: Iterable[Job], tokens: int) -> None:
        """Each of `jobs`, which run, emitted `tokens` output tokens: as `emit` for one after the other, but where an
        output token has one price the books and the policy are told once a client."""
        if tokens <= 0:
            return
        if not isinstance(self.cost, Linear) or self.policy.predictor is not None:
            for job in jobs:
                self.emit(job, tokens)
            return
        counts: defaultdict[str, int] = defaultdict(int)
        for job in jobs:
            output = job.output_tokens + tokens
            if job.system or output > job.max_output_tokens:
                self.emit(job, tokens)
            else:
                job.output_tokens = output
                counts[job.client] += tokens
        for client, count in counts.items():
            units = self.cost.output_weight * count
            self.ledger.record(client, output=count, service=units)
            self._swing.charged(client, units)
            self.policy.charge(client, units)
            self._clients[client].owed_tokens -= count

    def finish(self, job_id: str) -> None:
        """A running request ended, by itself or by abort: no further charge, and no refund of what it got."""
        job = self._running.get(job_id)
        if job is not None:
            self._stop_running(job)
            self._settle(job)
            self._forget_if_idle(job)

    def retract(self, job: Job) -> None:
        """The engine took a running request back and will compute it again: it waits, first in line."""
        self._stop_running(job)
        job.retractions += 1
        job.repeating = True
        self._jobs[job.id] = job
        self._first.put(job, job.arrival)
        if not job.system:
            self._wait(job)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights: charges from now on are divided by the new ones. What running requests were
        charged ahead is charged again by the new weight, so that it is given back as it was taken."""
        own = self.policy.weights
        if own is None:
            return
        ahead = [(job, self._ahead(job)) for job in self._running.values() if job.client in weights]
        for job, units in ahead:
            self._charge_ahead(job, -units)
        for client, weight in weights.items():
            own.set(client, weight)
        for job, units in ahead:
            self._charge_ahead(job, units)

    # ---- what people and tests read

    def waiting(self) -> Iterable[Job]:
        """In order of arrival."""
        return sorted(self._jobs.values(), key=lambda job: job.arrival)

    def running(self) -> Iterable[Job]:
        return self._running.values()

    def find(self, job_id: str) -> Job | None:
        """The job with this id, waiting or running."""
        return self._jobs.get(job_id) or self._running.get(job_id)

    def is_waiting(self, job_id: str) -> bool:
        return job_id in self._jobs

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._jobs)

    def bound(self) -> float | None:
        """The policy's guarantee with the largest prompt and the largest owed output seen so far.

        Where prices are shared it is of charged service, and counts how far transfers have moved a counter so far.
        """
        if self.payers is not None and not self.policy.keeps_bound_with_transfers:
            return None
        input_units = self.dearest_input_units + self._swing.most_units
        return self.policy.bound(input_units, self._dearest_output_units())

    def status(self, most: int = 1000) -> Mapping[str, Any]:
        """State for people and programs, JSON-ready; the `most` clients with the most service are listed."""
        counters = self.policy.counters()
        accounts = self.ledger.accounts()
        busiest = sorted(accounts, key=lambda name: -accounts[name].service)[:most]
        names = dict.fromkeys([*busiest, *list(self._clients)[:most]])
        conservation = self.ledger.conservation()
        clients = {}
        for name in names:
            usage, presence = self.ledger.usage(name), self._clients.get(name, Presence())
            clients[name] = {
                "counter": counters.get(name),
                "extend_tokens": usage.extend_tokens,
                "output_tokens": usage.output_tokens,
                "cached_tokens": usage.cached_tokens,
                "service": usage.service,
                "transferred_units": usage.transferred_units,
                "requests": usage.requests,
                "backlog": presence.backlog if presence.waiting else None,
                "waiting": presence.waiting,
                "running": presence.running,
            }
        total = self.ledger.total
        return {
            "clients": clients,
            "totals": {
                "extend_tokens": total.extend_tokens,
                "output_tokens": total.output_tokens,
                "cached_tokens": total.cached_tokens,
                "service": total.service,
                "transferred_units": total.transferred_units,
                "waiting": len(self._jobs),
                "running": len(self._running),
            },
            "conservation": {name: getattr(conservation, name) for name in conservation.__slots__},
            "payer": FIRST if self.payers is None else self.payers.rule,
            "bound": self.bound(),
            "largest_input_tokens": self.largest_input_tokens,
            "largest_owed_tokens": self.largest_owed_tokens,
        }

    # ---- inside

    def _compute(self, job: Job, tokens: int, block: Hashable | None, predicted: int = 0) -> None:
        self._stop_computing(job)
        if block is not None:
            job.block = block
            self._computing.setdefault(block, Computation(job))
        start, job.reached_tokens = job.reached_tokens, job.reached_tokens + tokens
        if job.repeating or job.system:
            self.ledger.record(SYSTEM, extend=tokens)
            if self.payers is not None:
                self.payers.lost(job.path, start, job.reached_tokens)
            return
        units = self._charge(job, extend=tokens, predicted=predicted)
        if self.payers is not None:
            job.unpriced_units = self.payers.computed(
                job.client, job.path, start, job.reached_tokens, units, job.unpriced_units
            )
        self.largest_input_tokens = max(self.largest_input_tokens, job.extend_tokens)
        self.largest_prompt_tokens = max(self.largest_prompt_tokens, job.extend_tokens + job.cached_tokens)
        input_units = self.cost(job.extend_tokens, 0, job.cached_tokens)
        self.dearest_input_units = max(self.dearest_input_units, input_units)

    def _share(self, job: Job, cached_tokens: int) -> None:
        """`job` found tokens in the cache: its client takes over its part of their price from who paid it."""
        if self.payers is None:
            return
        self._swing.admitted(job.client)
        for client, units in self.payers.used(job.client, job.path, cached_tokens).items():
            self._swing.transferred(client, units)
            self.ledger.transfer(client, units)
            self.policy.charge(client, units)
            if client not in self._clients:
                self.policy.idle(client)

    def _charge(self, job: Job, *, extend: int = 0, output: int = 0, predicted: int = 0) -> float:
        """Book what it cost; charge the policy that, or what it will have cost after the predicted output. Returns
        the former."""
        cost, ahead = self._cost(job), self._ahead(job)
        job.extend_tokens += extend
        job.output_tokens += output
        job.predicted_tokens += predicted
        served = self._cost(job) - cost
        self.ledger.record(job.client, extend=extend, output=output, service=served)
        self._swing.charged(job.client, served)
        self.policy.charge(job.client, served + self._ahead(job) - ahead)
        return served

    def _settle(self, job: Job) -> None:
        """It ended: what was charged ahead and not made is given back, and the predictor learns of it."""
        predictor = self.policy.predictor
        if predictor is None or job.system:
            return
        unused = self._ahead(job)
        job.predicted_tokens = 0
        self._charge_ahead(job, -unused)
        if job.max_output_tokens:
            predictor.observe(job)

    def _charge_ahead(self, job: Job, units: float) -> None:
        if units:
            self.policy.charge(job.client, units)

    def _cost(self, job: Job) -> float:
        return self.cost(job.extend_tokens, job.output_tokens, job.cached_tokens)

    def _ahead(self, job: Job) -> float:
        """What the predicted output that it has not made yet will cost."""
        if job.predicted_tokens <= job.output_tokens:
            return 0.0
        return self.cost(job.extend_tokens, job.predicted_tokens, job.cached_tokens) - self._cost(job)

    def _dearest_output_units(self) -> float:
        _, output_units = self.cost.dearest(
            self.largest_prompt_tokens, self.largest_output_tokens, self.largest_owed_tokens
        )
        return output_units

    def _wait(self, job: Job) -> None:
        presence = self._presence(job.client)
        presence.waiting += 1
        if presence.waiting == 1:
            self._backlogs += 1
            presence.backlog = self._backlogs

    def _stop_waiting(self, job: Job) -> None:
        del self._jobs[job.id]
        if job.system or job.repeating:
            self._first.discard(job)
            if job in self._first_held:
                self._first_held.remove(job)
        else:
            self.policy.leave(job)
        if not job.system:
            self._presence(job.client).waiting -= 1

    def _stop_running(self, job: Job) -> None:
        del self._running[job.id]
        self._stop_computing(job)
        if not job.system:
            presence = self._presence(job.client)
            presence.running -= 1
            presence.owed_tokens -= job.max_output_tokens - job.output_tokens

    def _stop_computing(self, job: Job) -> None:
        if job.block is None:
            return
        computation = self._computing.get(job.block)
        if computation is not None and computation.job is job:
            del self._computing[job.block]

    def _presence(self, client: str) -> Presence:
        presence = self._clients.get(client)
        if presence is None:
            presence = self._clients[client] = Presence()
        return presence

    def _forget_if_idle(self, job: Job) -> None:
        presence = self._clients.get(job.client)
        if presence is not None and not presence.waiting and not presence.running:
            del self._clients[job.client]
            self.policy.idle(job.client)
