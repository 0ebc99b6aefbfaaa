"""DLPM against the paper: Algorithm 1 transcribed, the theorems, the worked example, the limits of the quantum."""

from collections import Counter
from dataclasses import dataclass, field, replace
from string import ascii_letters
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core.cost import Linear
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.fcfs import Lpm
from sglang_fair.core.job import Job
from sglang_fair.core.newcomers import AT_ONCE
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from tests.support.budget import examples
from tests.support.engine_model import (
    ClientHabit,
    EngineCase,
    Traffic,
    cases,
    engine_of,
    run,
    traced,
)
from tests.support.twins import Both, Literal, Script

QUANTA = st.sampled_from([1, 3, 10, 25, 80, 400])
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for name in "abcd"})

DLPM = settings(max_examples=examples(30))


# ---- the algorithm, literally


@dataclass
class LiteralDlpm(Literal):
    """Algorithm 1 with lists: the queue is sorted at each pick, a round is executed, nothing is remembered
    beside q and l. A held request stays in the queue and is skipped, its client keeps its say in the refill.
    Clients that are new start with a quantum and go first, within what `for_new` allows: it is worth that a new client
    was welcomed with, or what it was charged if that is more. It is known once a request of it is admitted after a
    round that followed its first charge.
    """

    quantum: int = 0
    newcomers: int = 4
    q: dict[str, int] = field(default_factory=dict)
    charged: set[str] = field(default_factory=set)
    refilled: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    welcome: dict[str, int] = field(default_factory=dict)
    drawn: dict[str, int] = field(default_factory=dict)
    for_new: float = field(init=False)

    def __post_init__(self) -> None:
        self.for_new = self.most

    @property
    def most(self) -> int:
        return AT_ONCE * self.quantum if self.newcomers else 0

    def arrive(self, job: Job) -> None:
        if job.client not in self.q:
            self.q[job.client] = 0
            self.drawn[job.client] = 0
            if self.for_new > 0:
                self.q[job.client] = self.welcome[job.client] = self.quantum
                self.for_new -= self.quantum
        super().arrive(job)

    def admitted(self, job: Job) -> None:
        if job.client in self.refilled - self.known:
            self.known.add(job.client)
            self.welcome.pop(job.client, None)

    def order(self, job: Job) -> tuple[bool, int, int]:
        is_new = job.client in self.welcome and job.client not in self.charged
        return not is_new, -job.prefix_tokens, job.arrival

    def pick(self) -> Job | None:
        while any(job not in self.held for job in self.waiting):
            for job in sorted(self.waiting, key=self.order):
                if self.q[job.client] > 0 and job not in self.held:
                    return job
            if any(self.q[job.client] > 0 for job in self.waiting):
                return None
            for client in self.q:
                if self.q[client] <= 0:
                    self.q[client] += self.quantum
                    self.refilled |= {client} & self.charged
        return None

    def charge(self, client: str, units: int) -> None:
        self.q[client] -= units
        self.charged.add(client)
        if client in self.known:
            self.for_new += self.newcomers * units
        elif client in self.welcome:
            beyond = self.drawn[client] + units - self.welcome[client]
            self.for_new -= min(units, max(0, beyond))
        self.drawn[client] += units
        self.for_new = min(self.for_new, self.most)

    def idle(self, client: str) -> None:
        if client not in self.charged:
            del self.q[client]
            self.for_new = min(self.for_new + self.welcome.pop(client, 0), self.most)

    def agrees_with(self, policy: Policy) -> bool:
        assert isinstance(policy, Dlpm)
        kept = {client: account.refund for client, account in policy._deficits.items() if account.refund}
        above = {client: q - self.quantum for client, q in self.q.items() if q > self.quantum}
        return kept == above and policy.counters() == {c: min(q, self.quantum) for c, q in self.q.items()}


@settings(DLPM, max_examples=examples(250))
@given(
    quantum=st.integers(1, 40),
    seed=st.integers(0, 2**32),
    newcomers=st.sampled_from([0, 1, 4]),
    clients=st.sampled_from(["abcd", ascii_letters]),
    holds=st.booleans(),
)
def test_counted_rounds_are_the_literal_rounds(quantum, seed, newcomers, clients, holds):
    """New clients start with a quantum within their limit, and held requests stay in the queue."""
    literal = LiteralDlpm(quantum=quantum, newcomers=newcomers)
    both = Both(Dlpm(quantum=quantum, newcomers=newcomers), literal)
    Script(both, seed, clients=clients, holds=holds).run(120)


# ---- the theorems (DLPM §4, appendix A)


@settings(DLPM, max_examples=examples(80))
@given(
    case=cases(),
    quantum=QUANTA,
    remembered=st.sampled_from([0, 2, 10_000]),
    patience=st.integers(1, 12),
    weights=st.just({}) | WEIGHTS,
)
def test_theorems_4_1_and_4_2_and_a_2(case, quantum, remembered, patience, weights):
    """T2, T3 and T4, without a clock, with the bound that the queue exports: whoever is remembered, whatever the order
    within a client, and for service divided by weight."""
    policy = Dlpm(quantum=quantum, remembered_clients=remembered, patience=patience, weights=Weights(weights))
    trace = traced(case, policy, weights=weights)
    bound = trace.replica.queue.account.bound()
    assert bound is not None
    smallest = min(weights.values(), default=1.0)
    assert bound <= 2 * (case.longest_prompt + 2 * case.pool_tokens + quantum) / min(1.0, smallest)
    assert trace.gap_between_backlogged() <= bound + 1e-6
    assert trace.lag_of_backlogged() <= bound + 1e-6
    assert trace.service_before_dispatch() <= (len(case.clients) - 1) * bound + 1e-6


@DLPM
@given(case=cases(), quantum=QUANTA)
def test_nobody_is_left_who_fits(case, quantum):
    """T5: a pass ends with an empty queue, a full step, a candidate that does not fit, or with requests
    whose tokens another one is computing in this very step; a client's credit may wait for those."""
    replica = engine_of(case, FairQueue(Dlpm(quantum=quantum)))
    traffic, seen = Traffic(case), []
    deferred: set[str] = set()
    defer = replica.admission._defer

    def spy(job: Job) -> None:
        deferred.add(job.id)
        defer(job)

    replica.admission._defer = spy
    for _ in range(case.steps):
        traffic.step(replica)
        deferred.clear()
        replica.step()
        left = [job for job in replica.passed_over if job.id not in deferred]
        seen += left
        if left:
            holders = {job.client for job in replica.passed_over if job.id in deferred}
            assert holders, "nobody was held, and yet nobody was offered"
        if replica.candidate is not None:
            assert replica.queue.is_waiting(replica.candidate.id)
    assert not seen or case.block_tokens is not None


# ---- scenarios


FLOOD = EngineCase(
    loads=(
        ClientHabit("a", 30, prompt_tokens=(4, 4), output_tokens=(6, 6), families=1, shared_tokens=12),
        ClientHabit("b", 30, prompt_tokens=(12, 12), output_tokens=(4, 4), families=1, shared_tokens=0),
    ),
    pool_tokens=120,
    cache_tokens=256,
    steps=300,
)
"""Client a has a hot prefix, client b has none, and both want everything."""


@pytest.mark.parametrize("idle_first", [True, False])
def test_where_steps_are_mixed_a_client_that_runs_nothing_goes_first(idle_first):
    """Of those with credit, whatever prefix the others have; again when its requests have ended, or were taken back."""
    queue = FairQueue(policy := Dlpm(quantum=10_000))
    policy.idle_first = idle_first
    for number, (client, prefix) in enumerate([("a", 0), ("b", 0)] + [("a", 9)] * 3 + [("b", 0)] * 2):
        queue.arrive(Job(str(number), client, 10, 10, prefix_tokens=prefix))
    order = []

    def admit() -> Job:
        queue.begin_pass()
        job = queue.next()
        assert job is not None
        order.append(job.client)
        queue.admit(job, extend_tokens=10, cached_tokens=0)
        return job

    for first in ("0", "1"):  # both were charged, so that none is a newcomer
        queue.admit(queue.find(first), extend_tokens=10, cached_tokens=0)
        queue.finish(first)
    admit()
    second = admit()
    admit()
    queue.finish(second.id)
    admit()
    assert order == (["a", "b", "a", "b"] if idle_first else ["a", "a", "a", "b"])


@pytest.mark.parametrize("quantum", [1, 30, 300])
def test_a_hot_client_cannot_starve_a_cold_one(quantum):
    fair, greedy = traced(FLOOD, Dlpm(quantum=quantum)), traced(FLOOD, Lpm())
    assert fair.gap_between_backlogged() <= fair.replica.queue.account.bound()
    assert greedy.gap_between_backlogged() > 4 * fair.replica.queue.account.bound()
    assert fair.replica.service["b"] > 0.45 * sum(fair.replica.service.values())


def test_a_large_quantum_is_lpm():
    """For the clients that are there from the start: nobody's quantum is ever used up."""
    for seed in range(5):
        loads = tuple(
            replace(load, start=0, busy_steps=1, pause_steps=0, closed=False, depth=8) for load in FLOOD.loads
        )
        case = replace(FLOOD, loads=loads, seed=seed, steps=60)
        assert run(case, Dlpm(quantum=1e15, newcomers=0)).admissions == run(case, Lpm()).admissions


def serve(policy: Dlpm, client: str, units: float) -> None:
    """One request of `client`, alone in the queue, from its arrival to its end."""
    policy.arrive(job := Job(client, client))
    assert policy.pick() is job
    policy.leave(job)
    policy.charge(client, units)
    policy.idle(client)


def test_being_forgotten_never_pays():
    """Credit beyond `remembered_clients` is dropped, the longest absent first, debts never; and then a client
    that is not known gets no more than any that was dropped had left."""
    policy = Dlpm(quantum=10, remembered_clients=1)
    serve(policy, "debtor", 100)
    serve(policy, "a", 7)
    assert policy.counters() == {"debtor": -90, "a": 3}
    serve(policy, "b", 1)
    assert policy.counters() == {"debtor": -90, "b": 9}
    policy.arrive(Job("a", "a"))
    assert 0 <= policy.deficit("a") <= 3


@pytest.mark.parametrize("passes_begin", [False, True])
def test_a_debtor_is_absent_with_credit_from_the_round_that_pays_it(passes_begin):
    """Regression: it joined the creditors only at the next `release` or `idle`, so whether a pass had begun between
    decided which of two absent clients was forgotten."""
    policy = Dlpm(quantum=10, remembered_clients=1)
    policy.arrive(long := Job("long", "late"))
    policy.leave(long)
    policy.charge("late", 1)  # runs until the end, with credit
    serve(policy, "debtor", 15)
    policy.arrive(job := Job("poor", "poor"))
    policy.charge("poor", 12)
    assert policy.pick() is job
    assert policy.counters() == {"late": 9, "debtor": 5, "poor": 8}, "one round passed"
    if passes_begin:
        policy.release()
    policy.idle("late")
    assert sorted(policy.counters()) == ["late", "poor"]


@dataclass
class Flood:
    """Under any policy: a known client that always waits, and new names, `waiting` of them at any time, one request
    each. `slots` requests run at once; each is charged its prompt when it is admitted and then 2 units a step."""

    policy: Policy
    prompt: int = 500
    output: int = 1000
    slots: int = 1
    waiting: int = 1
    aborts: bool = False
    """Half of the names go before they are served."""
    cancels: bool = False
    """Beside them one name has an answer without end, and in each step sends another request and gives it up."""
    service: dict[str, int] = field(default_factory=Counter)
    most_accounts: int = 0
    number: int = 0
    names: list[Job] = field(default_factory=list)
    running: dict[Job, int] = field(default_factory=dict)
    """Output tokens that each has still to make."""

    @property
    def cost(self) -> int:
        return self.prompt + 2 * self.output

    def run(self, requests: int) -> None:
        """Until so many were admitted."""
        if not self.number:
            if self.cancels:
                self.arrive("canceller")
                self.admit()
            self.arrive("known")
            self.arrive("known")
        admitted = 0
        while admitted < requests:
            while len(self.running) < self.slots + self.cancels:
                self.top_up()
                self.admit()
                admitted += 1
            for job in list(self.running):
                self.charge(job, 2)
                if job.client == "canceller":
                    self.policy.leave(self.arrive(job.client))
                    continue
                self.running[job] -= 1
                if not self.running[job]:
                    self.end(job)

    def arrive(self, client: str, prefix_tokens: int = 0) -> Job:
        self.number += 1
        job = Job(str(self.number), client, arrival=self.number, prefix_tokens=prefix_tokens)
        self.policy.arrive(job)
        return job

    def top_up(self) -> None:
        if self.aborts:
            for job in self.names[::2]:
                self.policy.leave(job)
                self.policy.idle(job.client)
            self.names = self.names[1::2]
        while len(self.names) < self.waiting:
            self.names.append(self.arrive(f"name {self.number}", prefix_tokens=5))

    def admit(self) -> None:
        self.most_accounts = max(self.most_accounts, len(self.policy.counters()))
        self.policy.release()
        job = self.policy.pick()
        assert job is not None
        self.policy.leave(job)
        self.charge(job, self.prompt)
        self.policy.admitted(job)
        self.running[job] = self.output
        if job.client == "known":
            self.arrive("known")
        elif job in self.names:
            self.names.remove(job)

    def charge(self, job: Job, units: int) -> None:
        self.policy.charge(job.client, units)
        self.service[job.client.split()[0]] += units

    def end(self, job: Job) -> None:
        del self.running[job]
        if job.client != "known":
            self.policy.idle(job.client)


def known_share(policy: Dlpm, **load: Any) -> tuple[float, int]:
    """Of the service, what the known client gets beside new names; and the accounts kept."""
    flood = Flood(policy, **load)
    flood.run(150)
    flood.service.clear()
    flood.run(400)
    return flood.service["known"] / sum(flood.service.values()), flood.most_accounts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("newcomers", "quantum", "load", "promise"),
    [
        (0, 2000, {}, 0.4444),
        (1, 2000, {}, 0.3077),
        (4, 400, {"prompt": 300, "output": 750, "cancels": True}, 0.1053),
        (4, 200, {"output": 300, "prompt": 100, "waiting": 4, "slots": 8, "cancels": True}, 0.0526),
        (4, 100, {"output": 300, "prompt": 100, "waiting": 6, "slots": 8, "cancels": True}, 0.0213),
        (4, 200, {"prompt": 120, "output": 300, "waiting": 2, "slots": 4, "cancels": True}, 0.0820),
    ],
)
def test_a_known_client_keeps_its_part_beside_names_that_are_charged_token_by_token(
    newcomers: int, quantum: int, load: dict[str, Any], promise: float
) -> None:
    """The 1 / (1 + newcomers + k c/Q^u) of the module's head, also beside one name with an answer without end that
    gives a request up at each step."""
    made = Flood(Dlpm(quantum=quantum), **load)
    assert promise == pytest.approx(1 / (1 + newcomers + made.waiting * made.cost / quantum), abs=1e-4)
    policy = Dlpm(quantum=quantum, newcomers=newcomers, remembered_clients=10)
    share, accounts = known_share(policy, **load)
    assert share == pytest.approx(promise, rel=0.15)
    assert accounts < 200


@DLPM
@given(
    newcomers=st.integers(0, 6),
    quantum=st.integers(5, 60),
    prompt=st.integers(4, 20),
    output=st.integers(1, 30),
    slots=st.integers(1, 12),
    waiting=st.integers(1, 4),
    aborts=st.booleans(),
    cancels=st.booleans(),
)
def test_a_flood_of_new_names_gets_its_part_and_no_more(
    newcomers, quantum, prompt, output, slots, waiting, aborts, cancels
):
    """The bound of the module's head: what was set aside at once, `newcomers` times what the known client got, and a
    quantum with an overdraft in each round for those that wait; and the accounts are as many as that keeps in debt.
    What a name gave up made it known once, so that the rest of its answer let others in."""
    policy = Dlpm(quantum=quantum, newcomers=newcomers, remembered_clients=5)
    flood = Flood(policy, prompt, output, slots, waiting, aborts, cancels)
    cost = flood.cost
    flood.run(150 + 100 * quantum // cost)
    known = flood.service["known"]
    rounds = (known + slots * cost) / quantum + 1
    welcomed = newcomers * known + (AT_ONCE + 1) * quantum + (1 + slots) * cost
    assert flood.service["name"] <= welcomed + (waiting + slots) * cost * rounds
    while_in_debt = cost / quantum + 3
    names_a_round = waiting + slots + newcomers * (2 * quantum + slots * cost) / min(quantum, cost)
    at_once = AT_ONCE * max(1, quantum / cost)
    assert flood.most_accounts <= 5 + at_once + while_in_debt * names_a_round


def test_so_many_new_names_are_welcome_and_those_that_abort_as_they_wait_use_nothing_up():
    """Regression: a quantum was set aside for each, and its account was kept."""
    policy = Dlpm(quantum=10)
    for number in range(1000):
        policy.arrive(job := Job(str(number), f"name {number}", arrival=number))
        policy.leave(job)
        policy.idle(job.client)
    assert not policy.counters()
    policy.arrive(Job("last", "welcome", arrival=1000))
    assert policy.deficit("welcome") == 10
    for number in range(1, AT_ONCE + 1):
        policy.arrive(Job(f"stays {number}", f"stays {number}", arrival=1000 + number))
    assert [policy.deficit(f"stays {number}") for number in (1, AT_ONCE - 1, AT_ONCE)] == [10, 10, 0]


def test_what_is_charged_ahead_and_given_back_changes_no_allowance():
    """Regression: at the allowance's limit a charge counted nothing and its refund four times."""
    policy = Dlpm(quantum=10)
    full = policy._new.left
    for number in range(2):
        policy.arrive(job := Job(str(number), "known", arrival=number))
        assert policy.pick() is job
        policy.leave(job)
        policy.charge("known", 10 if number == 0 else 0)
        policy.admitted(job)
    assert policy._new.left == full - 10
    policy.charge("known", 1000)
    assert policy._new.left == full
    policy.charge("known", -900)
    assert policy._new.left == full
    policy.arrive(Job("new", "new", arrival=2))
    assert policy._new.left == full - 10
    policy.charge("known", 900)
    assert policy._new.left == full - 10, "that much was counted before"
    policy.charge("known", 1)
    assert policy._new.left == full - 6


def test_fractions_do_not_stop_the_rounds():
    """Quanta and prices that binary fractions cannot say: every request is still admitted, one a round."""
    for quantum in (0.1, 1 / 3, 1e-6, 1e9):
        queue = FairQueue(Dlpm(quantum=quantum), Linear(0.1, 0.7))
        for number in range(60):
            queue.arrive(Job(str(number), "ab"[number % 2], max_output_tokens=3))
        done = 0
        queue.begin_pass()
        while (job := queue.next()) is not None:
            queue.admit(job, extend_tokens=1 + done % 7, cached_tokens=0)
            queue.account.emit(job, 3)
            queue.finish(job.id)
            done += 1
        assert done == 60
        assert all(units <= quantum * (1 + 1e-9) for units in queue.policy.counters().values())


def test_a_refill_puts_nobody_into_order_and_leaves_aside_who_was_set_aside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Dlpm(quantum=10)
    clients = [f"client {number}" for number in range(AT_ONCE)]
    jobs = {
        client: Job(client, client, arrival=at, prefix_tokens=1000 - at) for at, client in enumerate(clients)
    }
    for job in jobs.values():
        policy.arrive(job)
    first, second, third = clients[:3]
    assert policy.pick() is jobs[first]
    assert policy.set_aside(lambda job: job.client in (first, second)) == [first, second]
    for client in clients:
        policy.charge(client, 10 if client != second else 20)
    ranked: list[str] = []
    rank = Dlpm._rank
    monkeypatch.setattr(
        Dlpm, "_rank", lambda self, client, head: (ranked.append(client), rank(self, client, head))
    )
    assert policy.pick() is jobs[third], "it was not set aside"
    assert policy.refills == 1
    assert set(ranked) <= {first, second}
    policy.release()
    assert policy.pick() is jobs[first]
    for client in clients:
        if client != second:
            policy.charge(client, 10)
    assert policy.pick() is jobs[first]
    assert policy.deficit(second) == 10, "its debt was paid by two rounds"
