"""WSC: normalised service, its bound with interactions first, and who gains by lying."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import strategies as st

from sglang_fair.core import make_policy
from sglang_fair.core.cost import make_cost
from sglang_fair.core.job import Job
from sglang_fair.core.options import check_together
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.wsc import Wsc
from tests.support.steps import Engine, Sender


class Scaled(Engine):
    """Runs eight requests at a time, and keeps what each client got in normalised units."""

    def __init__(self, policy: Policy, senders: Iterable[Sender], seed: int = 0) -> None:
        named = [replace(sender, name=name) for name, sender in zip("abcd", senders, strict=False)]
        super().__init__(named, policy, seed=seed, most=8)
        self.worst_gap = 0.0
        """Of the counters of clients that wait."""
        self.worst_batch = 0.0
        """Of one client's requests that ran at once."""
        self.received = dict.fromkeys((sender.name for sender in named), 0.0)
        """By the scales that were charged."""
        self.difference = 0.0
        """The most by which two clients' parts differed over a time in which both waited."""
        self.begun_passed_over = 0
        """Admissions of first calls while a call of an interaction that had begun could be had."""
        self.ahead: dict[tuple[str, str], tuple[float, float]] = {}
        """By how much one was ahead of the other since both wait: the least and the most."""

    def admit(self, job: Job) -> None:
        self.begun_passed_over += job.call == 1 and any(other.call > 1 for other in self.queue.jobs())
        super().admit(job)
        self.received[job.client] += job.prompt_tokens * job.scale
        self.look()

    def emit(self, job: Job) -> None:
        super().emit(job)
        self.received[job.client] += 2 * job.scale

    def decode(self) -> None:
        super().decode()
        self.look()

    def look(self) -> None:
        batches: Counter[str] = Counter()
        for job in self.running.values():
            batches[job.client] += (job.prompt_tokens + 2 * job.max_output_tokens) * job.scale  # type: ignore[assignment]
        self.worst_batch = max(self.worst_batch, *batches.values(), 0.0)
        counters, waiting = self.queue.policy.counters(), {job.client for job in self.queue.jobs()}
        values = [counters[client] for client in waiting]
        self.worst_gap = max(self.worst_gap, max(values, default=0.0) - min(values, default=0.0))
        for pair in combinations(self.received, 2):
            if not waiting.issuperset(pair):
                self.ahead.pop(pair, None)
                continue
            ahead = self.received[pair[0]] - self.received[pair[1]]
            least, most = self.ahead.get(pair, (ahead, ahead))
            least, most = self.ahead[pair] = min(least, ahead), max(most, ahead)
            self.difference = max(self.difference, most - least)

    def largest_batch(self) -> float:
        """U: the dearest prompt and the most output owed at once, normalised; all of a client's requests that ran at
        once if they are charged when they end."""
        if self.queue.policy.charges_at_end:
            return self.worst_batch
        ever = self.queue.account.largest.ever
        return ever.input_units + 2 * ever.owed_tokens


habits = st.builds(
    Sender,
    waiting=st.just(30),
    open=st.sampled_from([1, 30]),
    calls=st.sampled_from([1, 20]),
    app=st.sampled_from(["chat", "code"]),
    prompt=st.sampled_from([(1, 5), (1, 200)]),
    output=st.sampled_from([(1, 5), (1, 60)]),
    comes=st.sampled_from([0, 60]),
    stays=st.sampled_from([0, 5, 25]),
    leaves=st.sampled_from([10, 40]),
)


@pytest.mark.parametrize(("lead", "first"), [(0.0, "new"), (2.0, "started")])
def test_a_call_of_an_interaction_that_has_begun_goes_first(lead: float, first: str) -> None:
    policy = Wsc(lead=lead)
    queue = FairQueue(policy)
    queue.arrive(Job("started", "b", 1, 1, call=2))
    queue.arrive(Job("new", "a", 1, 1))
    policy.charge("b", 1.0)
    job = queue.next()
    assert job is not None
    assert job.id == first
    policy.charge("b", 2.0)
    job = queue.next()
    assert job is not None
    assert job.id == "new", "b is more than the lead ahead"


def gain(make: Callable[[], Wsc], label: str) -> float:
    """What a client of the light app gets when it names `label`, over what it gets when it does not."""
    light = Sender(waiting=30, app="light", prompt=(10, 10), output=(5, 5))
    heavy = replace(light, app="heavy", prompt=(700, 700), output=(100, 100))
    got = []
    for said in ("", label):
        made = Scaled(make(), (light, replace(light, label=said), heavy)).run(800)
        got.append(made.queue.account.ledger.usage("b").service)
    return got[1] / got[0]


@pytest.mark.slow
def test_a_liar_gains_no_more_than_the_spread_allows() -> None:
    gains = {spread: gain(lambda spread=spread: Wsc(spread=spread), "heavy") for spread in (1.0, 2.0, 8.0)}
    assert gains[1.0] == pytest.approx(1, rel=0.15)
    for spread, gained in gains.items():
        assert gained <= spread**2 * 1.15
    assert gains[2.0] <= gains[8.0] * 1.15


# ---- prices, options, what is learnt


def charged(system_tokens: int, **options: object) -> float:
    """What a policy counts, before the scale, for 60 prompt tokens of which 40 are computed and 5 output tokens."""
    policy = make_policy("wsc", **options)
    queue = FairQueue(policy)
    queue.arrive(job := Job("1", "a", 60, 5, system_tokens=system_tokens))
    queue.arrive(Job("2", "a", 1, 1))  # or its client would be forgotten
    queue.admit(job, extend_tokens=30, cached_tokens=20)
    queue.account.extend(job, 10)
    queue.account.emit_each([job], 2)
    queue.account.emit(job, 3)
    queue.finish("1")
    assert queue.account.ledger.usage("a").service == 40 + 2 * 5, "the books stay in plain units"
    return policy.counters()["a"] / job.scale


@pytest.mark.parametrize("charge", ["incremental", "on_finish"])
def test_prices_are_the_policy_s_own(charge: str) -> None:
    assert charged(0, charge=charge) == pytest.approx(40 + 2 * 5)
    assert charged(0, charge=charge, input_price=3.0, output_price=1.0) == pytest.approx(3 * 40 + 5)
    assert charged(30, charge=charge, literal=True) == pytest.approx(40 + 10 + 5), (
        "10 of the 30 were not cached"
    )
    assert charged(55, charge=charge, system_price=0.0) == pytest.approx(40 - 35 + 2 * 5)


def test_a_weight_of_long_ago_loosens_the_bound_no_more_but_the_lead_stays() -> None:
    policy = Wsc(lead=2.0)
    policy.weights.set("a", 0.25)
    assert policy.weights.smallest_ever() == policy.weights.smallest() == 0.25
    assert policy.bound(1, 1, 0.25) == 2 * 2 / 0.25 + 2 * 2.0
    policy.weights.set("a", 1.0)
    for _ in range(3):  # nothing is left of the time of that weight
        policy.weights.settle(lambda _: False, True)
    assert policy.bound(1, 1, policy.weights.smallest_ever()) == 2 * 2 / 0.25 + 2 * 2.0
    assert policy.bound(1, 1, policy.weights.smallest()) == 2 * 2 + 2 * 2.0


def test_costs_and_payers_that_do_not_go_with_it_are_refused() -> None:
    for name in ("wsc", "wsc-dlpm"):
        policy = make_policy(name)
        check_together(policy, make_cost("linear:1,3"), "first")
        with pytest.raises(ValueError, match="must be linear, not profiled"):
            check_together(policy, make_cost("profiled"), "first")
        with pytest.raises(ValueError, match="payer first"):
            check_together(policy, make_cost("linear"), "equal")
    check_together(make_policy("vtc"), make_cost("profiled"), "equal")
