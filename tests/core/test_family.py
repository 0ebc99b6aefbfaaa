"""The relatives of VTC and DLPM: without the lift, in a ring, with predicted outputs. Bounds and counter-examples."""

from collections import Counter
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.drr import Drr
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.predicted import DlpmPredict, VtcNoisy, VtcOracle, VtcPredict
from sglang_fair.core.predictor import MeanOfLast, Noisy, Oracle
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.vtc import Lcf, Vtc
from tests.core.test_dlpm import Flood
from tests.support.budget import examples
from tests.support.engine_model import ClientHabit, EngineCase, EngineModel, Watcher, cases, run, traced
from tests.support.twins import Both, Literal, Script

FAMILY = settings(max_examples=examples(40))
QUANTA = st.sampled_from([1, 3, 10, 25, 80, 400])
WEIGHTS = st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 3.0]) for name in "abcd"})


def u_of(case: EngineCase) -> float:
    """VTC's U: the dearest prompt, or a pool full of outputs."""
    return max(case.longest_prompt, 2 * case.pool_tokens)


# ---- least counter first


@FAMILY
@given(case=cases())
def test_without_absences_the_lift_changes_nothing(case):
    """Clients that wait from the first step to the last: VTC and LCF admit the same."""
    case = replace(
        case,
        loads=tuple(replace(load, depth=20, pause_steps=0, start=0, closed=False) for load in case.loads),
        steps=20,
    )
    vtc, lcf = traced(case, Vtc()), traced(case, Lcf())
    if all(all(row.waiting) for row in vtc.rows[20 * len(case.loads) :]):
        assert lcf.replica.admissions == vtc.replica.admissions


def test_only_so_many_absent_clients_are_remembered():
    """The smallest counters are forgotten first; a client that still waits never is."""
    policy = Lcf(remembered_clients=3)
    for number in range(10):
        job = Job(str(number), f"client{number}", arrival=number)
        policy.arrive(job)
        policy.leave(job)
        policy.charge(job.client, 10 + number)
    for number in range(10):
        policy.idle(f"client{number}")
    assert policy.counters() == {"client7": 17, "client8": 18, "client9": 19}


# ---- deficit round robin


@dataclass
class LiteralDrr(Literal):
    """The ring of appendix C.2 with lists, one visit at a time. Who joins is visited from the next round on;
    who is gone and owes nothing leaves the ring."""

    quantum: int = 0
    ring: list[str] = field(default_factory=list)
    at: int = -1
    """Where the last visit was."""
    over: bool = True
    """That visit is over: nobody stands there any more."""
    fresh: set[str] = field(default_factory=set)
    credit: dict[str, int] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)

    def arrive(self, job: Job) -> None:
        self.absent.discard(job.client)
        if job.client not in self.ring:
            self.ring.append(job.client)
            self.fresh.add(job.client)
            self.credit[job.client] = 0
        super().arrive(job)

    def pick(self) -> Job | None:
        while self.waiting:
            client = self.ring[self.at] if not self.over else None
            mine = [job for job in self.waiting if job.client == client]
            if client is not None and self.credit[client] > 0 and mine:
                return mine[0]
            self._visit_next()
        return None

    def _visit_next(self) -> None:
        self.at, self.over = self.at + 1, False
        if self.at == len(self.ring):
            self.at = 0
            self.fresh.clear()
        client = self.ring[self.at]
        waits = any(job.client == client for job in self.waiting)
        credit = self.credit[client]
        if client not in self.fresh and credit <= 0 and (waits or credit < 0):
            self.credit[client] += self.quantum

    def charge(self, client: str, units: int) -> None:
        self.credit[client] -= units

    def idle(self, client: str) -> None:
        self.absent.add(client)
        for gone in [name for name in self.absent if self.credit[name] >= 0]:
            self.over |= self.ring.index(gone) == self.at
            self.at -= self.ring.index(gone) <= self.at
            self.ring.remove(gone)
            del self.credit[gone]
            self.absent.discard(gone)
            self.fresh.discard(gone)

    def agrees_with(self, policy: Policy) -> bool:
        return policy.counters() == self.credit


@settings(FAMILY, max_examples=examples(120))
@given(quantum=st.integers(1, 40), seed=st.integers(0, 2**32))
def test_counted_visits_are_the_literal_visits(quantum, seed):
    both = Both(Drr(quantum=quantum), LiteralDrr(quantum=quantum))
    Script(both, seed, clients="abcdef", holds=False).run(150)


def test_the_ring_stands_still_while_a_client_whose_turn_it_is_is_held():
    """Or the one behind it would be served without credit, in a round that has not come."""
    policy = Drr(quantum=10)
    first, second, other = (Job(id, id[0], arrival=number) for number, id in enumerate(("a1", "a2", "b1")))
    for job in (first, second, other):
        policy.arrive(job)
    assert policy.pick() is first
    policy.leave(first)
    policy.charge("a", 25)
    assert policy.pick() is other
    policy.hold(other)
    assert policy.pick() is None
    policy.release()
    assert policy.pick() is other


@FAMILY
@given(
    quantum=st.integers(5, 60),
    prompt=st.integers(4, 20),
    output=st.integers(1, 30),
    slots=st.integers(1, 12),
    waiting=st.integers(1, 4),
    aborts=st.booleans(),
)
def test_names_that_are_charged_token_by_token_get_a_quantum_a_round(
    quantum, prompt, output, slots, waiting, aborts
):
    """The bound is `dlpm`'s without an allowance: in each round the known client gets a quantum, and each name that
    waits a quantum with an overdraft. So it keeps 1 / (1 + k·c / Q^d), and only so many accounts are kept."""
    flood = Flood(Drr(quantum=quantum), prompt, output, slots, waiting, aborts)
    flood.run(150 + 100 * quantum // flood.cost)
    rounds = (flood.service["known"] + slots * flood.cost) / quantum + 2
    assert flood.service["name"] <= (waiting + slots) * flood.cost * rounds
    assert flood.most_accounts <= 2 + (waiting + slots) * (flood.cost / quantum + 3)


# ---- patience within one client


def overtakings(case: EngineCase, policy: Policy) -> tuple[int, EngineModel]:
    """The most later requests of its own client that were admitted while one waited, and the run."""
    order: dict[str, int] = {}

    def watch(replica: EngineModel) -> Watcher:
        return lambda: order.update({job.id: job.arrival for job in replica.queue.waiting()})

    replica = run(case, policy, watch=watch)
    worst = 0
    for client in case.clients:
        mine = [order[entry.id] for entry in replica.admissions if entry.client == client]
        left = [job.arrival for job in replica.queue.waiting() if job.client == client]
        for place, arrival in enumerate([*mine, *left]):
            worst = max(worst, sum(earlier > arrival for earlier in mine[:place]))
    return worst, replica


@FAMILY
@given(case=cases(deferral=False), quantum=QUANTA, patience=st.integers(1, 12))
def test_nobody_is_overtaken_more_often_than_patience_allows(case, quantum, patience):
    """However hot the later ones are, and whoever is aborted."""
    assert overtakings(case, Dlpm(quantum=quantum, patience=patience))[0] <= patience


def test_an_overdue_request_that_is_held_delays_nobody():
    policy = Dlpm(patience=1)
    cold = Job("cold", "a", arrival=1)
    hot = [Job(str(number), "a", arrival=number, prefix_tokens=9) for number in (2, 3)]
    for job in (cold, *hot):
        policy.arrive(job)
    assert policy.pick() is hot[0]
    policy.leave(hot[0])
    assert policy.pick() is cold
    policy.hold(cold)
    assert policy.pick() is hot[1]
    policy.release()
    assert policy.pick() is cold


# ---- predicted outputs


@dataclass
class Longest:
    """Expects of every request the longest output that it may make."""

    def predict(self, job: Job) -> float:
        return job.max_output_tokens

    def observe(self, job: Job) -> None:
        pass


@dataclass
class Wild:
    """Guesses anything, also what no request can make."""

    seed: int

    def predict(self, job: Job) -> float:
        return Random(f"{self.seed} {job.id}").uniform(-10, 60)

    def observe(self, job: Job) -> None:
        pass


PREDICTORS = st.one_of(
    st.builds(MeanOfLast),
    st.builds(Oracle),
    st.builds(Noisy, percent=st.sampled_from([50, 100]), seed=st.integers(0, 99)),
    st.builds(Longest),
    st.builds(Wild, st.integers(0, 99)),
)


@dataclass
class Charges:
    """What a policy was charged in all, beside what the queue's jobs say that it should have been."""

    replica: EngineModel
    net: Counter[str] = field(default_factory=Counter)
    worst_ahead: float = 0.0

    def __post_init__(self) -> None:
        policy = self.replica.queue.policy
        charge = policy.charge

        def spy(client: str, units: float) -> None:
            self.net[client] += units
            charge(client, units)

        policy.charge = spy  # type: ignore[method-assign]

    def __call__(self) -> None:
        """Net charges are the service in the books and, for each job that is not over, what it has still to
        make of its prediction."""
        queue = self.replica.queue
        ahead: Counter[str] = Counter()
        for job in (*queue.running(), *queue.waiting()):
            assert 0 <= job.predicted_tokens <= job.max_output_tokens
            if not job.system:
                ahead[job.client] += 2 * max(0, job.predicted_tokens - job.output_tokens)
        for client, net in self.net.items():
            assert net == queue.account.ledger.usage(client).service + ahead[client]
            self.worst_ahead = max(self.worst_ahead, ahead[client])


@FAMILY
@given(case=cases(), predictor=PREDICTORS, lifts=st.booleans())
def test_predictions_are_charged_ahead_and_never_in_the_books(case, predictor, lifts):
    kept: list[Charges] = []

    def watch(replica: EngineModel) -> Watcher:
        kept.append(Charges(replica))
        return kept[0]

    policy = Vtc(predictor=predictor) if lifts else Dlpm(quantum=20, predictor=predictor)
    replica = run(case, policy, watch=watch)
    for client in case.clients:
        assert replica.queue.account.ledger.usage(client).service == replica.service[client]
    while len(replica.queue) or any(replica.running.values()):
        replica.step()
    assert +kept[0].net == +replica.service


def served(
    queue: FairQueue, client: str, *, prompt: int, output: int, most: int, expects: int | None = None
) -> Job:
    """One request of `client`, admitted and advanced by `output` tokens."""
    number = queue._arrivals + 1
    queue.arrive(
        job := Job(f"{client}{number}", client, max_output_tokens=most, expected_output_tokens=expects)
    )
    queue.begin_pass()
    assert queue.next() is job
    queue.admit(job, extend_tokens=prompt, cached_tokens=0)
    queue.account.emit(job, output)
    return job


def test_a_retracted_request_keeps_its_prediction_and_gives_it_back_once():
    queue = FairQueue(VtcOracle())
    keeper = served(queue, "a", prompt=1, output=0, most=1, expects=0)
    job = served(queue, "a", prompt=10, output=2, most=20, expects=6)
    queue.retract(job)
    queue.begin_pass()
    assert queue.next() is job
    assert queue.policy.counters()["a"] == 23
    queue.admit(job, extend_tokens=12, cached_tokens=0)
    assert queue.policy.counters()["a"] == 23
    queue.retract(job)
    queue.leave(job.id)
    assert queue.policy.counters()["a"] == 1 + 10 + 4 == queue.account.ledger.usage("a").service
    assert queue.is_waiting(keeper.id) is False


def test_any_cost_function_is_charged_ahead_exactly():
    class Quadratic:
        def __call__(self, extend_tokens: int, output_tokens: int, cached_tokens: int = 0) -> float:
            return extend_tokens + (output_tokens * (extend_tokens + cached_tokens + output_tokens))

        def dearest(self, input_tokens: int, output_tokens: int, owed_tokens: int) -> tuple[float, float]:
            return 0.0, 0.0

    queue = FairQueue(VtcOracle(), Quadratic())
    served(queue, "a", prompt=0, output=0, most=1, expects=0)
    job = served(queue, "a", prompt=3, output=0, most=20, expects=6)
    assert queue.policy.counters()["a"] == 3 + 6 * (3 + 6)
    queue.account.extend(job, 5)
    assert queue.policy.counters()["a"] == 8 + 6 * (8 + 6)
    queue.account.emit(job, 8)
    assert queue.policy.counters()["a"] == 8 + 8 * (8 + 8)
    queue.finish(job.id)
    assert queue.policy.counters()["a"] == 8 + 8 * (8 + 8) == queue.account.ledger.usage("a").service


@FAMILY
@given(case=cases(whole_prompts=True, deferral=False, aborts=False))
def test_an_oracle_keeps_the_bound(case):
    """VTC's theorem 4.4, and its lemma, when every prediction is right and nothing is aborted."""
    trace = traced(case, VtcOracle())
    assert trace.gap_between_backlogged() <= 2 * u_of(case)
    assert trace.gap_between_backlogged() <= trace.replica.queue.account.bound()
    assert deepest_fall(case, VtcOracle()) == 0


def deepest_fall(case: EngineCase, policy: Policy) -> float:
    """How far the smallest counter in the queue ever fell (lemma A.1: not at all)."""
    least = worst = 0.0

    def watch(replica: EngineModel) -> Watcher:
        def look() -> None:
            nonlocal least, worst
            counters = replica.queue.policy.counters()
            queued = [counters[job.client] for job in replica.queue.waiting()]
            if queued:
                worst, least = max(worst, least - min(queued)), max(least, min(queued))

        return look

    run(case, policy, watch=watch)
    return worst


UNSURE = ClientHabit("a", 6, prompt_tokens=(4, 4), output_tokens=(1, 40), families=1, shared_tokens=0)
GUESSED = EngineCase((UNSURE, replace(UNSURE, client="b")), 200, 0, 1, None, None, seed=1, steps=200)
"""Two clients whose outputs nobody can know."""


def test_a_predictor_that_errs_breaks_the_lemma():
    """Refunds lower the smallest counter, on which the proof of theorem 4.4 stands: no bound is exported."""
    assert deepest_fall(GUESSED, Vtc()) == 0
    assert deepest_fall(GUESSED, VtcOracle()) == 0
    for policy in (VtcNoisy, VtcPredict):
        assert deepest_fall(GUESSED, policy()) > 10
        assert traced(GUESSED, policy()).replica.queue.account.bound() is None


@FAMILY
@given(case=cases(), quantum=QUANTA, predictor=PREDICTORS, weights=WEIGHTS)
def test_dlpm_keeps_its_bound_whatever_is_predicted(case, quantum, predictor, weights):
    """2·(U + Q^u + P): T2 and T3 hold with it for right, wrong and impossible predictions."""
    policy = Dlpm(quantum=quantum, weights=Weights(weights), predictor=predictor)
    trace = traced(case, policy, weights=weights)
    bound = trace.replica.queue.account.bound()
    assert trace.gap_between_backlogged() <= bound + 1e-6
    assert trace.lag_of_backlogged() <= bound + 1e-6
    assert all(units <= quantum for units in policy.counters().values()), "a refund lifts none above it"


def test_the_bound_has_what_a_predictor_may_charge_ahead():
    """Up to all that one client's running requests may still make, once more."""
    assert DlpmPredict(quantum=50).bound(10, 20) == 2 * (10 + 20 + 20 + 50)
    assert Dlpm(quantum=50).bound(10, 20) == 2 * (10 + 20 + 50)


SURE = ClientHabit("a", 6, prompt_tokens=(1, 1), output_tokens=(40, 40), families=1, shared_tokens=0)
MISJUDGED = EngineCase(
    (SURE, replace(UNSURE, client="b", depth=12)), 200, 0, 1, None, None, seed=1, steps=1500
)
"""b's outputs are half as long as the longest; a's are the longest."""


def test_no_refund_is_lost():
    """Rounds pass while a request runs; what it had been charged too much is then more than one quantum. A
    client that is always charged too much would lose the difference each time."""
    trace = traced(MISJUDGED, Dlpm(quantum=20, predictor=Longest()))
    assert trace.gap_between_backlogged() <= trace.replica.queue.account.bound()


ALIKE = replace(UNSURE, output_tokens=(30, 30), depth=20)
PREDICTABLE = EngineCase((ALIKE, replace(ALIKE, client="b")), 400, 0, 1, None, None, seed=1, steps=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "told"),
    [(Vtc(), VtcOracle()), (Vtc(), VtcPredict()), (Dlpm(quantum=50), DlpmPredict(quantum=50))],
)
def test_a_prediction_narrows_the_gap(plain, told):
    """Long outputs, known or learnt: after a warm-up the two clients' lead over each other swings less than
    half as far."""

    def swing(policy: Policy) -> float:
        rows = traced(PREDICTABLE, policy).rows
        leads = [row.service[0] - row.service[1] for row in rows[len(rows) // 4 :]]
        return max(leads) - min(leads)

    assert swing(told) < swing(plain) / 2


def job_of(client: str, output_tokens: int = 0, expects: int | None = None, id: str = "x") -> Job:
    return Job(id, client, output_tokens=output_tokens, expected_output_tokens=expects)


def test_the_mean_is_of_the_clients_last_five():
    mean = MeanOfLast()
    assert mean.predict(job_of("a")) == 0
    for output in (100, 10, 20, 30, 40, 50):
        mean.observe(job_of("a", output))
        mean.observe(job_of("b", 7))
    assert mean.predict(job_of("a")) == 30
    assert mean.predict(job_of("b")) == 7
    few = MeanOfLast(max_clients=2)
    for client in "abac":
        few.observe(job_of(client, 9))
    assert [few.predict(job_of(client)) for client in "abc"] == [9, 0, 9]


def test_the_oracle_believes_the_job_and_falls_back_to_the_mean():
    oracle = Oracle()
    oracle.observe(job_of("a", 8))
    assert oracle.predict(job_of("a")) == 8
    assert oracle.predict(job_of("a", expects=3)) == 3
    assert oracle.predict(job_of("a", expects=0)) == 0


def test_noise_is_uniform_within_its_limits_and_follows_the_job():
    noisy = Noisy(percent=50, seed=1)
    guesses = [noisy.predict(job_of("a", expects=100, id=str(number))) for number in range(2000)]
    assert 50 <= min(guesses) < 52 < 148 < max(guesses) <= 150
    assert sum(guesses) / 2000 == pytest.approx(100, abs=2)
    assert guesses[7] == Noisy(percent=50, seed=1).predict(job_of("a", expects=100, id="7"))
    assert guesses[7] != Noisy(percent=50, seed=2).predict(job_of("a", expects=100, id="7"))
    assert Noisy(percent=0).predict(job_of("a", expects=100)) == 100
