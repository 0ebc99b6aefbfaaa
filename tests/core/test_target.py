"""The target for those below their share: who is held back, who never is, and what it promises, under adversaries."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.step_times import USUAL_OF
from sglang_fair.core.steps import Steps, make_steps
from tests.support.budget import examples
from tests.support.steps import Clients, Engine, Sender

SHARING = [name for name in POLICIES if make_policy(name).shares_steps]
PLAIN = [name for name in SHARING if not POLICIES[name].scales]
"""Those whose bound is in units of the cost function."""
STALL_S, TARGET_S = 0.1, 0.03
BASE_S, REQUEST_S = 0.01, 0.001
"""A decode step of n requests takes BASE_S + n * REQUEST_S: 20 requests are within the target."""


def step_s(requests: int) -> float:
    return BASE_S + requests * REQUEST_S


class Checked(Engine):
    """Checks each decision by its own count of who runs."""

    def __init__(
        self, senders: list[Sender], policy: str = "dlpm", target_s: float | None = TARGET_S, **options: Any
    ) -> None:
        self.weights = Weights(
            {sender.client(n): sender.weight for sender in senders for n in range(sender.names)}
        )
        self.rule = Steps(STALL_S, self.weights, target_s=target_s)
        made = make_policy(policy, quantum=50, weights=self.weights)
        super().__init__(senders, made, self.rule, step_s=step_s, **options)
        self.measured = False
        self.set_aside: list[str] = []
        """In this pass."""
        original = self.queue.set_aside

        def set_aside(test: Callable[[Job], bool]) -> Sequence[str]:
            clients = original(test)
            for client in clients:
                assert self.crowds_out(client) or self.above(client), f"{client} is not above its share"
                assert self.crowds_out(client) or self.measured
            self.set_aside.extend(clients)
            return clients

        self.queue.set_aside = set_aside  # type: ignore[method-assign]

    def above(self, client: str) -> bool:
        """More than its share of those that run, by this engine's count; then another has less."""
        run = self.by_client()
        if not run[client]:
            return False
        whole = sum(self.weights.of(name) for name in run)
        share = {name: len(self.running) * self.weights.of(name) / whole for name in run}
        is_above = run[client] > share[client] * (1 + 1e-9)
        assert not is_above or any(run[name] < share[name] for name in run)
        return is_above

    def crowds_out(self, client: str) -> bool:
        """Where room is short: another that waits has fewer, and with one more it still has no more, by weight."""
        run, weight = self.by_client(), self.weights.of
        return len(self.running) + len(self.waiting) > self.most and any(
            (run[job.client] + 1) / weight(job.client) <= run[client] / weight(client) * (1 + 1e-9)
            for job in self.waiting.values()
            if job.client != client
        )

    def form(self, most: int = 10**6) -> list[Job]:
        self.set_aside.clear()
        return super().form(most)

    def admit(self, job: Job) -> None:
        if self.measured and self.rule.target_s and not job.repeating and self.above(job.client):
            longest_s = self.rule.target_s + 1e-9
            assert step_s(len(self.running) + 1) <= longest_s, "it pushes others over the target"
        super().admit(job)

    def passed_over(self) -> None:
        left = any(not job.repeating for job in self.waiting.values())
        assert not left or self.set_aside, "a request was passed over although no client is held back"

    def decode(self) -> None:
        self.measured |= bool(self.running)
        super().decode()


PLACES = 24
POLITE = Sender("polite", waiting=40, output=(5, 20), prompt=(1, 1))
"""It always waits."""


def most_of_burst(bursts: list[Sender], policy: str, seed: int) -> int:
    """How many requests of `bursts`, which begin one after the other, run at once at most."""
    made, most = Checked([POLITE], policy, 0.0, seed=seed, most=PLACES).run(30), 0
    for number in range(60):
        made.senders = [POLITE, *bursts[number : number + 1]]
        made.step()
        assert len([job for job in made.waiting.values() if job.client == "polite"]) > 0
        most = max(most, made.count("burst"))
    return most


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.builds(
            Sender,
            st.just("burst"),
            st.sampled_from([1, 10, 80]),
            prompt=st.sampled_from([(1, 1), (10, 10), (100, 100)]),
            output=st.sampled_from([(1, 1), (1, 60), (400, 400)]),
        ),
        max_size=20,
    ),
    st.sampled_from([name for name in PLAIN if make_policy(name).keeps_places]),
    st.integers(0, 2**20),
)
@example([Sender("burst", 80, prompt=(1, 1), output=(400, 400))], "dlpm", 0)
def test_a_client_that_always_waits_keeps_its_places_whatever_comes_in_bursts(
    bursts: list[Sender], policy: str, seed: int
) -> None:
    assert most_of_burst(bursts, policy, seed) <= PLACES // 2


LIGHT = Sender("light", output=(40, 40), sends=0.05)
FLOOD = Sender("flood", waiting=100, under_way=100)


@st.composite
def senders(draw: st.DrawFn) -> list[Sender]:
    return [
        Sender(
            name,
            waiting=draw(st.sampled_from([1, 1, 3, 30])),
            weight=draw(st.sampled_from([1.0, 1.0, 0.3, 4.0])),
            names=draw(st.sampled_from([1, 1, 7, 50])),
            output=(1, draw(st.sampled_from([1, 5, 40]))),
            aborts=draw(st.sampled_from([0.0, 0.0, 0.02, 0.5])),
            sends=draw(st.sampled_from([1.0, 0.3, 0.02])),
        )
        for name in "abcde"[: draw(st.integers(1, 5))]
    ]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    senders(),
    st.sampled_from(SHARING),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([TARGET_S, BASE_S / 2, None]),
)
def test_only_those_above_their_share_are_held_back(
    senders: list[Sender], policy: str, seed: int, retracts: float, target_s: float | None
) -> None:
    """Floods, many names, aborts, retractions. `Checked` asserts in each pass: only clients above their share are set
    aside, everybody else who waits is offered, and nobody above its share makes a step longer than the target."""
    made = Checked(senders, policy, target_s, seed=seed, retracts=retracts).run(60)
    made.senders = []
    made.retracts = 0.0
    made.run(4000 if made.waiting else 60)
    assert not made.waiting, "a request starved"
    assert not made.running


@pytest.mark.slow
@pytest.mark.parametrize("policy", SHARING)
def test_a_flood_comes_down_to_the_target_and_light_clients_run_at_once(policy: str) -> None:
    made = Checked([FLOOD, LIGHT], policy).run(1)
    assert len(made.running) > 50, "before a step was measured nobody is held back"
    beside, waited = [], 0
    for _ in range(200):
        made.step()
        waited += any(job.client == "light" for job in made.waiting.values())
        if made.count("light"):
            beside.append(len(made.running))
    assert waited <= 0.1 * 200, "where charges are predicted a light client may be ahead for a moment"
    assert made.rule.held_back > 50
    off = Checked([FLOOD, LIGHT], policy, target_s=0.0).run(100)
    assert len(off.running) >= 95
    assert off.rule.held_back == 0
    assert sum(beside) / len(beside) < 40, "although it refills whenever no light client runs"


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    st.lists(
        st.builds(
            Sender,
            st.just(""),
            waiting=st.just(45),  # more than may run: all wait all the time
            under_way=st.just(10**6),
            prompt=st.sampled_from([(1, 1), (10, 10), (100, 100), (1000, 1000)]),
            output=st.sampled_from([(1, 1), (1, 3), (20, 50), (50, 50)]),
        ),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from(PLAIN),
    st.integers(0, 2**20),
    st.sampled_from([TARGET_S, BASE_S, None]),
    st.sampled_from([5, 40]),
)
def test_the_policy_s_bound_holds_whoever_is_held_back(
    kinds: list[Sender], policy: str, seed: int, target_s: float | None, most: int
) -> None:
    """Of clients that all wait, some with long answers and some with long prompts: the former have more of the requests
    that run, and are held back."""
    kinds = [replace(kind, name=f"c{number}") for number, kind in enumerate(kinds)]
    made = Checked(kinds, policy, target_s, seed=seed, most=most)
    made.rule.step(8 * step_s(1), decoded=8, requests=1)
    ahead: dict[tuple[str, str], list[float]] = {}
    names = [sender.name for sender in made.senders]
    for _ in range(150):
        made.step()
        served = {name: made.queue.account.ledger.usage(name).service for name in names}
        for one, other in combinations(names, 2):
            ahead.setdefault((one, other), []).append(served[one] - served[other])
    if (bound := made.queue.account.bound()) is None:
        return
    assert max(max(differences) - min(differences) for differences in ahead.values()) <= bound + 1e-6


def flooded(
    others: int = 1, weight: float = 1.0, *, is_warm: bool = True, target_s: float | None = None
) -> list[float]:
    """Lengths of steps beside a flood of 100 and `others` with one request each, all of which run for long."""
    one = [Sender(f"light {n}", output=(10**6, 10**6), under_way=1, weight=weight) for n in range(others)]
    made = Checked([FLOOD, *one], target_s=target_s)
    if is_warm:
        made.rule.step(8 * step_s(1), decoded=8, requests=1)
    made.run(2)
    made.senders = [FLOOD]
    made.run(200)
    lengths = []
    for _ in range(300):
        made.step()
        lengths.append(step_s(len(made.running)))
    return lengths


def test_beside_a_client_that_always_runs_the_target_is_kept() -> None:
    """And nearly used up: the flood is not held back further than the target asks."""
    lengths = flooded(target_s=TARGET_S)
    assert max(lengths) <= TARGET_S + 1e-9
    assert sum(lengths) / len(lengths) > 0.8 * TARGET_S


@pytest.mark.slow
def test_without_a_number_a_token_takes_no_longer_than_on_an_engine_of_its_client_s_share() -> None:
    """A step for one request is known from the server's warm-up."""
    alone_s = step_s(1)
    for others, weight, share in ((1, 1.0, 1 / 2), (3, 1.0, 1 / 4), (1, 2.0, 2 / 3)):
        lengths = flooded(others, weight)
        assert max(lengths) <= alone_s / share + 1e-9
        assert sum(lengths) / len(lengths) > 0.8 * alone_s / share
    assert max(flooded(14)) == step_s(114), (
        "fifteen share the engine, and no step takes fifteen times as long as one of its own"
    )


def test_the_usual_length_of_a_step_counts_and_a_rare_one_does_not() -> None:
    """The first step of a kind may compile something, and the last one in an overlapped loop is only waited for."""
    steps = Clients(STALL_S)
    for length_s in (1.0, 0.01, 0.011, 0.01, 0.0001, 0.01, 0.0, 0.01):
        steps.step(length_s, decoded=1, requests=1)
    steps.step(0.000_1, decoded=1, requests=0)
    assert steps.status()["solo_s"] == 0.01
    for _ in range(USUAL_OF):
        steps.step(0.02, decoded=1, requests=1)
    assert steps.status()["solo_s"] == 0.02, "another model, longer contexts"


@pytest.mark.slow
def test_without_a_number_nobody_is_held_back_before_short_steps_were_seen() -> None:
    """How long a token takes on an engine of one's own is not guessed from steps with a hundred requests."""
    assert max(flooded(is_warm=False)) == step_s(101)


def test_weights_are_shares_of_those_that_run() -> None:
    steps = Clients(STALL_S, weights := Weights({"a": 3.0}), target_s=TARGET_S)
    clients = "aaab"
    steps.come(*clients)
    steps.decode(*clients)
    steps.step(2 * TARGET_S, decoded=1)
    assert not steps.holds("a")
    assert not steps.holds("b")
    weights.set("a", 1.0)
    steps.reweigh("a")
    assert steps.holds("a")
    assert not steps.holds("b")
    steps.come("c")
    assert not steps.holds("c"), "it runs nothing"
    for _ in range(2):
        steps.again("a")
    assert not steps.holds("a")


def test_weights_of_any_size_end_nothing() -> None:
    """Nothing is left of a small weight in a sum that a huge one was taken from."""
    steps = Clients(STALL_S, Weights({"huge": 1e17}), target_s=TARGET_S)
    clients = ("huge", "small", "small")
    steps.come(*clients)
    steps.begin(*clients)
    steps.end("huge")
    assert not steps.holds("small"), "it runs alone"


def test_a_token_takes_a_step_and_the_prompts_of_those_above_their_share_before_it() -> None:
    def new() -> Clients:
        steps = Clients(STALL_S, target_s=TARGET_S)
        clients = ("many", "many", "one")
        steps.come(*clients)
        steps.decode(*clients)
        steps.step(0.010, decoded=1)
        assert steps.expected_s(1) == pytest.approx(0.010)
        return steps

    between, own, mixed, probed = new(), new(), new(), new()
    for _ in range(100):
        between.step(0.040, {"many": 60, "one": 20})
        between.step(0.010, decoded=1)
        own.step(0.040, {"one": 80})
        own.step(0.010, decoded=1)
        mixed.step(0.040, {"many": 60, "one": 20}, decoded=1)
        probed.step(0.040, {SYSTEM: 80}, decoded=1)
    assert between.expected_s(1) == pytest.approx(0.040, rel=1e-3)
    assert own.expected_s(1) == pytest.approx(0.010)
    assert mixed.expected_s(1) == pytest.approx(0.010 + 0.75 * 0.030, rel=1e-3)
    assert probed.expected_s(1) == pytest.approx(0.010), "the server's own"


@pytest.mark.parametrize(
    ("step_s", "is_held"), [(0.0284, False), (0.0287, True), (0.030, True), (0.031, True)]
)
def test_what_counts_is_the_token_beside_one_request_more(step_s: float, is_held: bool) -> None:
    steps = Clients(STALL_S, target_s=TARGET_S)
    clients = 19 * ["many"] + ["one"]
    steps.come(*clients)
    steps.decode(*clients)
    steps.step(step_s, decoded=1)
    assert steps.holds("many") == is_held
    assert not steps.holds("one")


@pytest.mark.slow
def test_ten_thousand_waiting_requests_are_passed_over_in_one_go() -> None:
    """So the cost of a pass is that of its clients, however many requests each of them has."""
    always = Sender("light", output=(10**6, 10**6))
    made = Checked([Sender("flood", waiting=100, output=(10**6, 10**6)), always]).run(1)
    made.senders = [Sender("flood", waiting=10_000)]
    made.send(made.senders[0])
    asked, original = 0, made.queue.next

    def counted() -> Job | None:
        nonlocal asked
        asked += 1
        return original()

    made.queue.next = counted  # type: ignore[method-assign]
    made.form()
    assert made.set_aside == ["flood"]
    assert len(made.waiting) == 10_000
    assert asked <= 3


def test_the_server_s_own_and_retracted_requests_are_not_held_back() -> None:
    made = Checked([FLOOD, Sender("light", output=(500, 500))]).run(2)
    flooding = next(job for job in made.running.values() if job.client == "flood")
    made.waiting[flooding.id] = made.running.pop(flooding.id)
    made.admission.retract(flooding)
    own = Job("own", "(probe)", prompt_tokens=5, max_output_tokens=1, system=True)
    made.admission.arrive(own)
    made.admission.begin_pass(0)
    offered = list(made.admission.candidates())
    assert flooding in offered
    assert own in offered
    assert not any(job.client == "flood" and job is not flooding for job in offered)


def test_a_target_is_a_number_of_milliseconds_beside_a_bound_on_steps() -> None:
    policy = make_policy("dlpm")
    for bad in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="target_tpot_ms"):
            make_steps(policy, 100.0, bad)
    with pytest.raises(ValueError, match="stall_ms"):
        make_steps(policy, 0.0, 30.0)
    made = make_steps(policy, 100.0, 30.0)
    assert made is not None
    assert made.target_s == 0.03
    assert make_steps(make_policy("fcfs"), 100.0, 30.0) is None
