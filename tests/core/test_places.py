"""The places that are left where room is short: the counts that are kept say the same as the definition."""

from collections.abc import Mapping
from math import exp, inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.listener import Listener
from sglang_fair.core.places import ROUNDING, USUAL_S, Holder
from sglang_fair.core.steps import Steps
from sglang_fair.core.waits import BATCH, MEMORY
from tests.support.budget import examples
from tests.support.steps import Engine, Sender

KEEPING = [name for name in POLICIES if make_policy(name).keeps_places]


class Plain(Listener):
    """The definition: all clients are looked at for each candidate."""

    def __init__(self, engine: "Compared") -> None:
        self.engine = engine
        self.all = inf
        self.now_s = 0.0
        self.here: dict[str, Holder] = {}
        self.stuck: set[str] = set()

    def tick(self, now_s: float) -> None:
        self.now_s = now_s

    def arrive(self, job: Job) -> None:
        self.here.setdefault(job.client, Holder(self.now_s, self.now_s)).requests += 1

    def leave(self, job: Job) -> None:
        self.here[job.client].requests -= 1
        self.stuck.discard(job.client)
        if not self.here[job.client].requests:
            del self.here[job.client]

    def admit(self, job: Job) -> None:
        self.here[job.client].run(1, self.now_s)
        self.stuck.discard(job.client)
        self.all = max(self.all, self.running)

    def retract(self, job: Job) -> None:
        self.here[job.client].run(-1, self.now_s)

    def evict(self, job: Job, urgent: Job) -> None:
        self.retract(job)

    def finish(self, job: Job, outcome: str) -> None:
        self.retract(job)
        self.leave(job)

    def end_pass(self, cause: str, turns: Mapping[str, bool]) -> None:
        if cause in (BATCH, MEMORY):
            self.all = self.running

    @property
    def running(self) -> int:
        return sum(one.running for one in self.here.values())

    def crowds_out(self, job: Job) -> bool:
        mine, weight = self.here[job.client], self.engine.weights.of
        if not mine.running or job.repeating:
            return False
        theirs, room = 0, self.all - self.running
        for client, one in self.here.items():
            if client == job.client or one.requests == one.running:
                continue
            most = mine.running / weight(job.client) * (1 + ROUNDING) * weight(client)
            if client in self.stuck or not self.engine.admission.record.waits.has_turn(client):
                seconds = USUAL_S * (1 - exp((one.came_s - self.now_s) / USUAL_S))
                most = min(most, one._run_s_until(self.now_s) / seconds if seconds else 0.0)
            theirs += max(0, int(min(most, one.requests)) - one.running)
        return bool(theirs) and theirs >= room


class Compared(Engine):
    """Holds both against each other for all that wait, before each admission; at times it passes a candidate over."""

    def __init__(self, senders: list[Sender], policy: str, passes: float, **options: object) -> None:
        self.weights = Weights({sender.name: sender.weight for sender in senders})
        rule = Steps(0.1, self.weights, target_s=0.0)
        made = make_policy(policy, quantum=50, weights=self.weights)
        super().__init__(senders, made, rule, step_s=lambda requests: 0.3, **options)  # type: ignore[arg-type]
        self.passes, self.answers = passes, {True: 0, False: 0}
        self.plain = Plain(self)
        self.admission.listeners.add(self.plain)

    def compare(self) -> None:
        places = self.admission._places
        assert places is not None
        for job in self.waiting.values():
            says = places.crowds_out(job)
            assert says == self.plain.crowds_out(job)
            self.answers[says] += 1

    def form(self, most: int = 10**6) -> list[Job]:
        self.admission.begin_pass(self.sent, lambda: bool(self.running))
        batch = list[Job]()
        self.compare()
        for job in self.admission.candidates():
            if len(self.running) >= self.most:
                break
            if self.random.random() < self.passes and self.running:
                self.plain.stuck.add(job.client)
                continue
            self.admit(job)
            batch.append(job)
            self.compare()
        if self.random.random() < 0.1:
            client, weight = self.random.choice(self.senders).name, self.random.choice([0.3, 1.0, 1.7, 20.0])
            self.queue.set_weights({client: weight})
            self.compare()
        self.admission.end_pass(BATCH if len(self.running) >= self.most else None)
        return batch


SENDERS = st.builds(
    Sender,
    st.just(""),
    waiting=st.sampled_from([1, 2, 9, 40]),
    weight=st.sampled_from([1.0, 1.0, 0.3, 4.0, 1 / 3]),
    output=st.sampled_from([(1, 1), (1, 30), (40, 60)]),
    prompt=st.sampled_from([(1, 1), (60, 200)]),
    aborts=st.sampled_from([0.0, 0.0, 0.05]),
    sends=st.sampled_from([1.0, 0.7, 0.05]),
    stays=st.sampled_from([0, 0, 5]),
    leaves=st.just(7),
)


@settings(max_examples=examples(40))
@given(
    st.lists(SENDERS, min_size=2, max_size=7),
    st.sampled_from(KEEPING),
    st.integers(0, 2**20),
    st.sampled_from([3, 8, 24]),
    st.sampled_from([0.0, 0.2]),
    st.sampled_from([0.0, 0.05]),
)
def test_counts_say_what_the_definition_says(
    senders: list[Sender], policy: str, seed: int, most: int, passes: float, retracts: float
) -> None:
    named = [Sender(**(vars(sender) | {"name": f"c{number}"})) for number, sender in enumerate(senders)]
    Compared(named, policy, passes, seed=seed, most=most, retracts=retracts).run(60)


@pytest.mark.parametrize("policy", KEEPING)
def test_they_say_both(policy: str) -> None:
    """Or nothing would have been compared above."""
    senders = [Sender(f"c{n}", waiting=1 + 3 * n, output=(5, 60), weight=1.0 + n % 2) for n in range(6)]
    answers = Compared(senders, policy, 0.05, most=16).run(200).answers
    assert min(answers.values()) > 100, answers
