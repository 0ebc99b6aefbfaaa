"""WSC: normalised service, its bound with interactions first, and who gains by lying."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.core import make_policy
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.wsc import Wsc


@dataclass(frozen=True)
class Habit:
    """A client keeps `waiting` calls waiting, spread over `open` interactions of `calls` calls each."""

    waiting: int = 30
    open: int = 1
    calls: int = 1
    app: str = "chat"
    label: str = ""
    """What it says its app is; "" for the truth."""
    prompt: tuple[int, int] = (1, 20)
    output: tuple[int, int] = (1, 20)


@dataclass
class Engine:
    """Runs `most` requests at a time, one token each a step. All clients wait all the time."""

    policy: Wsc
    habits: dict[str, Habit]
    seed: int = 0
    most: int = 8
    sent: int = 0
    now: float = 0.0
    left: dict[Job, int] = field(default_factory=dict)
    names: dict[Job, Interaction] = field(default_factory=dict)
    worst_gap: float = 0.0
    """Of the counters of clients that wait."""
    worst_batch: float = 0.0
    """Of one client's requests that ran at once, normalised."""
    received: dict[str, float] = field(default_factory=dict)
    """Normalised, by the scales that were charged."""
    ahead: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.queue = FairQueue(self.policy)
        self.interactions = Interactions(most_calls=10**6, most_open=10**6)
        self.received = dict.fromkeys(self.habits, 0.0)

    def run(self, steps: int) -> "Engine":
        for _ in range(steps):
            self.now += 1
            self.interactions.tick(self.now)
            for client, habit in self.habits.items():
                self.send(client, habit)
            self.queue.begin_pass()
            while len(self.queue.account.running) < self.most and (job := self.queue.next()) is not None:
                self.queue.admit(job, extend_tokens=job.prompt_tokens, cached_tokens=0)
                self.received[job.client] += job.prompt_tokens * job.scale
                self.look()
            for job in list(self.queue.account.running.values()):
                self.queue.account.emit(job, 1)
                self.received[job.client] += 2 * job.scale
                self.left[job] -= 1
                if not self.left[job]:
                    self.queue.finish(job.id)
                    self.interactions.end(
                        self.names[job], is_answered=job.call >= self.habits[job.client].calls
                    )
            self.look()
        return self

    def send(self, client: str, habit: Habit) -> None:
        mine = sum(job.client == client for job in self.queue.waiting())
        for _ in range(habit.waiting - mine):
            self.sent += 1
            number = self.random.randrange(habit.open)
            name = Interaction(client, habit.app, f"{number}" if habit.calls > 1 else f"{self.sent}")
            output = self.random.randint(*habit.output)
            job = Job(
                str(self.sent), client, self.random.randint(*habit.prompt), output,
                app=habit.label or habit.app, call=self.interactions.accept(name),
            )  # fmt: skip
            self.left[job], self.names[job] = output, name
            self.queue.arrive(job)

    def look(self) -> None:
        batches: dict[str, float] = {}
        for job in self.queue.account.running.values():
            cost = (job.prompt_tokens + 2 * job.max_output_tokens) * job.scale
            batches[job.client] = batches.get(job.client, 0.0) + cost
        self.worst_batch = max(self.worst_batch, *batches.values(), 0.0)
        counters = self.policy.counters()
        waiting = {job.client for job in self.queue.waiting()}
        if len(waiting) < len(self.habits):
            return
        values = [counters[client] for client in waiting]
        self.worst_gap = max(self.worst_gap, max(values) - min(values))
        for one, other in combinations(sorted(self.habits), 2):
            self.ahead.setdefault((one, other), []).append(self.received[one] - self.received[other])

    @property
    def difference(self) -> float:
        return max(max(values) - min(values) for values in self.ahead.values())

    def largest_batch(self) -> float:
        """U: the dearest prompt and the most output owed at once, normalised; all of a client's requests that ran at
        once if they are charged when they end."""
        if self.policy.charges_at_end:
            return self.worst_batch
        ever = self.queue.account.largest.ever
        return ever.input_units + 2 * ever.owed_tokens


habits = st.builds(
    Habit,
    open=st.sampled_from([1, 30]),
    calls=st.sampled_from([1, 20]),
    app=st.sampled_from(["chat", "code"]),
    prompt=st.sampled_from([(1, 5), (1, 200)]),
    output=st.sampled_from([(1, 5), (1, 60)]),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(habits, min_size=2, max_size=4),
    st.integers(0, 2**20),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from(["incremental", "on_finish"]),
)
def test_counters_of_who_waits_differ_by_a_batch_and_the_lead(
    kinds: list[Habit], seed: int, lead: float, charge: str
) -> None:
    """FS-P7 and FS-P11."""
    made = Engine(Wsc(lead=lead, charge_when=charge), dict(zip("abcd", kinds, strict=False)), seed).run(150)
    assert made.worst_gap <= made.largest_batch() + lead + 1e-6
    bound = made.queue.account.bound()
    assert (bound is None) == (charge == "on_finish")
    assert made.difference <= (bound or 2 * (made.worst_batch + lead)) + 1e-6


def test_the_paper_s_rule_has_no_bound() -> None:
    """One client keeps 30 interactions open, and the others' single calls wait for ever."""
    many = Habit(open=30, calls=20, waiting=30)
    gaps = {}
    for lead in (2.0, inf):
        made = Engine(Wsc(lead=lead), {"a": many, "b": Habit(), "c": Habit()}, seed=1).run(400)
        gaps[lead] = made.worst_gap / (made.largest_batch() + 2)
    assert gaps[2.0] <= 1
    assert gaps[inf] > 3
    assert Wsc(lead=inf).bound(1, 1) is None


def test_an_average_call_counts_one_whatever_the_application() -> None:
    """FS-P5: and an interaction of m average calls counts m."""
    habits = {
        "a": Habit(app="short", prompt=(10, 10), output=(5, 5)),
        "b": Habit(app="long", prompt=(60, 60), output=(10, 10)),
    }
    made = Engine(Wsc(), habits)
    made.run(300)
    before = dict(made.received)
    calls = {client: made.queue.account.ledger.usage(client).requests for client in habits}
    made.run(1500)
    for client in habits:
        more = made.queue.account.ledger.usage(client).requests - calls[client]
        assert made.received[client] - before[client] == pytest.approx(more, rel=0.1)
    assert made.received["a"] == pytest.approx(made.received["b"], rel=0.1)


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
    light, heavy = (
        Habit(app="light", prompt=(10, 10), output=(5, 5)),
        Habit(app="heavy", prompt=(700, 700), output=(100, 100)),
    )
    got = []
    for said in ("", label):
        liar = Habit(app="light", label=said, prompt=(10, 10), output=(5, 5))
        made = Engine(make(), {"honest": light, "liar": liar, "heavy": heavy}).run(800)
        got.append(made.queue.account.ledger.usage("liar").service)
    return got[1] / got[0]


def test_a_liar_gains_no_more_than_the_spread_allows() -> None:
    gains = {spread: gain(lambda spread=spread: Wsc(spread=spread), "heavy") for spread in (1.0, 2.0, 8.0)}
    assert gains[1.0] == pytest.approx(1, rel=0.15)
    for spread, gained in gains.items():
        assert gained <= spread**2 * 1.15
    assert gains[2.0] <= gains[8.0] * 1.15


def test_dlpm_with_normalised_charges_keeps_its_bound() -> None:
    policy = make_policy("wsc-dlpm", quantum=2.0)
    made = Engine(
        policy, {"a": Habit(open=30, calls=20), "b": Habit(app="code", prompt=(1, 300))}, seed=3
    ).run(600)  # type: ignore[arg-type]
    bound = made.queue.account.bound()
    assert bound is not None
    assert made.difference <= bound + 1e-6


def test_bad_settings() -> None:
    for bad in ({"lead": -1.0}, {"lead": float("nan")}, {"spread": 0.5}, {"charge_when": "never"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            make_policy("wsc", **bad)  # type: ignore[arg-type]
