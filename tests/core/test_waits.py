"""What requests wait for, against a state for each of them that is looked at whenever time passes."""

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.core.job import Job
from sglang_fair.core.waits import (
    BATCH,
    DEFICIT,
    ENGINE,
    FIRST,
    MEMORY,
    PREFIX,
    PROMPTS,
    RUNNING,
    STEP,
    TARGET,
    Clock,
    Waits,
)

CLIENTS = ("a", "b", "c")


@dataclass
class Looked:
    """The same, by looking at every request that waits."""

    cause: str = STEP
    turn_cause: str | None = None
    waiting: dict[Job, str] = field(default_factory=dict)
    """With the client as which each waits."""
    spent: dict[Job, Counter[str]] = field(default_factory=dict)
    without_turn: set[str] = field(default_factory=set)
    aside: set[str] = field(default_factory=set)
    held: dict[Job, str] = field(default_factory=dict)

    def pass_time(self, ns: int) -> None:
        for job, client in self.waiting.items():
            self.spent[job][self.cause_of(job, client)] += ns

    def cause_of(self, job: Job, client: str) -> str:
        if job in self.held:
            return self.held[job]
        if client in self.aside:
            return TARGET
        if client in self.without_turn:
            return self.turn_cause or self.cause
        return self.cause

    def end(self, job: Job) -> None:
        client = self.waiting.pop(job)
        self.held.pop(job, None)
        if client not in self.waiting.values():
            self.without_turn.discard(client)
            self.aside.discard(client)


@pytest.mark.slow
@given(st.data())
def test_the_causes_of_a_wait_are_those_that_it_had_at_each_moment(data: st.DataObject) -> None:
    waits, looked = Waits(), Looked()
    known: dict[Job, Clock] = {}
    for number in range(data.draw(st.integers(1, 25))):
        for _ in range(data.draw(st.integers(0, 3))):
            job = Job(f"{number}", data.draw(st.sampled_from(CLIENTS)))
            first = data.draw(st.sampled_from([False, False, False, True]))
            looked.waiting[job] = FIRST if first else job.client
            known[job] = waits.begin(looked.waiting[job])
            looked.spent[job] = Counter()
        _pass_time(data, waits, looked)
        _one_pass(data, waits, looked, known)
        _pass_time(data, waits, looked)
        if data.draw(st.sampled_from([False, False, True])):
            waits.stop(MEMORY)
            looked.turn_cause = looked.turn_cause if looked.turn_cause != looked.cause else None
            looked.cause = MEMORY
        _pass_time(data, waits, looked)
        _some_end(data, waits, looked, known)
        for job, wait in known.items():
            assert waits.spent_ns(wait) == {cause: ns for cause, ns in looked.spent[job].items() if ns}
    assert waits.waiting == len(looked.waiting)
    assert set(waits._clients) == set(looked.waiting.values())


def _pass_time(data: st.DataObject, waits: Waits, looked: Looked) -> None:
    ns = data.draw(st.integers(0, 10**10))
    waits.now_ns += ns
    looked.pass_time(ns)


def _some_end(data: st.DataObject, waits: Waits, looked: Looked, known: dict[Job, Clock]) -> None:
    for job in [job for job in looked.waiting if data.draw(st.sampled_from([False, False, True]))]:
        waits.end(known[job])
        looked.end(job)


def _one_pass(data: st.DataObject, waits: Waits, looked: Looked, known: dict[Job, Clock]) -> None:
    """Some are passed over, some are admitted, and it ends for some reason."""
    held, aside = dict[Job, str](), set[str]()
    for job, client in looked.waiting.items():
        passed_over = data.draw(st.sampled_from([None, None, None, PREFIX, ENGINE, TARGET]))
        if passed_over == TARGET and client != FIRST:
            waits.set_aside([client])
            aside.add(client)
        elif passed_over is not None and passed_over != TARGET:
            waits.hold(known[job], passed_over)
            held[job] = passed_over
    before = set(looked.waiting)
    _some_end(data, waits, looked, known)
    gone = before - set(looked.waiting)
    cause = data.draw(st.sampled_from([STEP, RUNNING, PROMPTS, BATCH, MEMORY]))
    turn_cause = data.draw(st.sampled_from([None, DEFICIT]))
    turns = data.draw(st.dictionaries(st.sampled_from(CLIENTS), st.booleans()))
    waits.end_pass(cause, dict(turns), turn_cause)
    present = set(looked.waiting.values())
    looked.held = {job: cause for job, cause in held.items() if job not in gone}
    looked.aside = aside & present
    for client in turns.keys() & present:
        (looked.without_turn.discard if turns[client] else looked.without_turn.add)(client)
    looked.cause, looked.turn_cause = (cause, turn_cause) if looked.waiting else (STEP, None)


def test_ten_thousand_names_leave_nothing_behind() -> None:
    waits = Waits()
    for number in range(10_000):
        name = f"name {number}"
        wait = waits.begin(name)
        waits.hold(wait, PREFIX)
        waits.set_aside([name])
        if number % 2:
            waits.end_pass(MEMORY, {name: False, "somebody else": False}, DEFICIT)
        waits.end(wait)
    waits.end_pass(MEMORY, {}, None)
    assert waits.waiting == 0
    assert [*waits._clients, *waits._apart] == []
