"""The record of a replica's last requests, on a whole engine and against what can be counted from outside."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.job import Job
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.record import LEAST_NOTED, NS, Record
from sglang_fair.core.waits import BATCH, CAUSES, DEFICIT, MEMORY, STEP
from tests.core.test_admission import Engine
from tests.support.budget import examples
from tests.support.engine_model import EngineCase, EngineModel, Request, Traffic, cases, engine_of

ON_THE_ENGINE = settings(max_examples=examples(5))
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


def only(record: Record, id: str) -> dict[str, Any]:
    found = record.find(id)
    assert len(found) == 1, found
    return found[0]


@dataclass
class Seen:
    """What can be seen of the requests from outside: in which order they came, and in which step they were admitted."""

    replica: EngineModel
    came: dict[str, int] = field(default_factory=dict)
    """Request -> the step after which it came; in order of arrival."""

    def note(self) -> None:
        for job in self.replica.queue.waiting():
            self.came.setdefault(job.id, self.replica.steps)

    def admitted(self) -> dict[str, int]:
        return {line.id: line.step for line in self.replica.admissions}

    def overtaken(self, id: str, until: int) -> tuple[int, int]:
        order, admitted = list(self.came), self.admitted()
        later = [admitted[other] for other in order[order.index(id) + 1 :] if other in admitted]
        return len([step for step in later if step < until]), len({step for step in later if step < until})


@every_policy
@given(case=cases())
@ON_THE_ENGINE
def test_waits_and_overtakes_are_what_can_be_counted(name: str, case: EngineCase) -> None:
    """For every request that was admitted, that still waits, and that was given up while it waited."""
    replica, seen = _run(name, case)
    record, admitted = replica.admission.record, seen.admitted()
    assert seen.came
    waiting = {job.id for job in replica.queue.waiting()}
    for id, came in seen.came.items():
        found = only(record, id)
        assert sum(found["waited_for_s"].values()) == pytest.approx(found["waited_s"], abs=1e-9)
        assert all(spent > 0 for spent in found["waited_for_s"].values())
        assert found["waited_for_s"].keys() <= set(CAUSES)
        if id in admitted:
            assert found["waited_s"] == admitted[id] - came
            assert (found["overtaken_by"], found["overtaken_in_batches"]) == seen.overtaken(id, admitted[id])
        elif id in waiting:
            assert found["state"] == "waiting"
            assert found["waited_s"] == replica.steps - came
            assert (found["overtaken_by"], found["overtaken_in_batches"]) == seen.overtaken(
                id, replica.steps + 1
            )
        else:
            assert found["outcome"] == "aborted"
    assert len(record) >= len(seen.came) + len(replica.refused)


def _run(name: str, case: EngineCase) -> tuple[EngineModel, Seen]:
    replica = engine_of(case, FairQueue(make_policy(name, quantum=20)))
    seen, traffic = Seen(replica), Traffic(case)
    for _ in range(case.steps):
        traffic.step(replica)
        seen.note()
        replica.step()
    return replica, seen


@every_policy
def test_counters_and_refills_are_the_policys(name: str) -> None:
    replica = EngineModel(FairQueue(make_policy(name, quantum=20)), pool_tokens=60)
    policy, record = replica.queue.policy, replica.admission.record
    for number in range(30):
        client = "ab"[number % 2]
        _arrive(replica, str(number), client, prompt=9, output=4)
        refills = policy.refills
        if not replica.queue.is_waiting(str(number)):
            continue
        assert only(record, str(number))["running_at_arrival"] == len(list(replica.queue.running()))
        counter = policy.counters().get(client)
        assert policy.counter(client) == counter
        assert only(record, str(number))["counter_at_arrival"] == counter
        replica.step()
        found = only(record, str(number))
        if found["state"] == "waiting":
            assert found["refills"] == (None if refills is None else (policy.refills or 0) - refills)
    assert all(policy.counter(client) in (None, counter) for client, counter in policy.counters().items())


@dataclass
class Counted:
    """The same by looking at all requests."""

    batch: int = 0
    admitted: dict[int, int] = field(default_factory=dict)
    """`Job.arrival` -> the number of its batch."""

    def of(self, job: Job) -> tuple[int, int]:
        later = [b for other, b in self.admitted.items() if other > job.arrival and b < self.batch]
        return len(later), len(set(later))


def _overtaken(record: Record, job: Job) -> tuple[int, int]:
    found = only(record, job.id)
    return found["overtaken_by"], found["overtaken_in_batches"]


@pytest.mark.slow
@given(st.integers(0, 2**20), st.sampled_from([1, 5, 40]), st.sampled_from([0, 1, 5]))
def test_the_overtakes_are_those_of_everybody(seed: int, at_once: int, aborts: int) -> None:
    """Batches take requests at random, mostly late ones, so that some note what has overtaken them many times."""
    rng, record, counted = Random(seed), _record(), Counted()
    waiting: list[Job] = []
    arrived = 0

    def arrive() -> None:
        nonlocal arrived
        waiting.append(_came(record, arrived))
        arrived += 1

    for _ in range(60):
        for _ in range(rng.randrange(2 * at_once)):
            arrive()
        for _ in range(min(len(waiting), rng.randrange(at_once + 1))):
            job = waiting.pop(max(rng.randrange(len(waiting)), rng.randrange(len(waiting))))
            record.admit(job)
            assert _overtaken(record, job) == counted.of(job)
            counted.admitted[job.arrival] = counted.batch
            if rng.random() < 0.5:
                record.finish(job, "finished")
            if rng.random() < 0.1:  # while a batch is formed others come
                arrive()
        record.end_pass(BATCH, {})
        counted.batch += 1
        for _ in range(min(len(waiting), rng.randrange(aborts + 1))):
            job = waiting.pop(rng.randrange(len(waiting)))
            record.leave(job)
            assert _overtaken(record, job) == counted.of(job)
        for job in rng.sample(waiting, min(len(waiting), 3)):
            assert _overtaken(record, job) == counted.of(job)
    for job in waiting:
        assert _overtaken(record, job) == counted.of(job)


def test_one_that_waits_for_ever_costs_no_memory() -> None:
    record = _record()
    first = _came(record, 0)
    for number in range(1, 20_000):
        job = _came(record, number)
        record.admit(job)
        record.end_pass(BATCH, {})
        record.finish(job, "finished")
        assert len(record._latest) <= len(record._admitted) <= LEAST_NOTED
    assert _overtaken(record, first) == (19_999, 19_999)


def _came(record: Record, number: int) -> Job:
    job = Job(str(number), "a", arrival=number)
    record.arrive(job)
    return job


# ---- each cause


@pytest.mark.parametrize("name", ["dlpm", "vtc", "drr", "lcf"])
def test_the_deficit_is_the_cause_if_others_have_had_less(name: str) -> None:
    """There is room for one. With its first request the flooder has had more than its due: others go first, although
    they came later than its second one."""
    replica = EngineModel(FairQueue(make_policy(name, quantum=5)), pool_tokens=12, block_tokens=None)
    for id in ("first", "waits"):
        _arrive(replica, id, "flood", prompt=10, output=2)
    for number in range(3):
        _arrive(replica, f"light {number}", f"light {number}", prompt=10, output=2)
    _steps(replica, 10)
    found = only(replica.admission.record, "waits")
    assert found["outcome"] == "finished"
    assert found["overtaken_by"] == found["overtaken_in_batches"] == 3
    assert found["waited_for_s"][DEFICIT] >= 4
    assert found["counter_at_arrival"] != found["counter_at_admission"]
    assert DEFICIT not in only(replica.admission.record, "light 0")["waited_for_s"]


def test_alone_nobody_waits_for_its_own_deficit() -> None:
    replica = EngineModel(FairQueue(make_policy("dlpm", quantum=1)), pool_tokens=12)
    for number in range(3):
        _arrive(replica, str(number), "alone", prompt=10, output=2)
    _steps(replica, 5)
    assert only(replica.admission.record, "2")["waited_for_s"] == {STEP: 1, MEMORY: 4}


def test_one_that_was_taken_back_waits_for_memory() -> None:
    engine = Engine(make_policy("dlpm", quantum=100))
    job = engine.arrive("job")
    for found in engine.begin_pass():
        engine.admit(found)
    engine.admission.end_pass(None)
    engine.admission.tick(2.0)
    engine.admission.retract(job)
    engine.admission.tick(5.0)
    shown = only(engine.admission.record, "job")
    assert (shown["state"], shown["retractions"]) == ("waiting", 1)
    assert (shown["waited_s"], shown["waited_again_s"]) == (3, 3)
    assert shown["waited_for_s"] == {MEMORY: 3}


# ---- without an engine


def _record() -> Record:
    return Record(make_policy("dlpm"))


def _serve(record: Record, job: Job) -> None:
    record.arrive(job)
    record.admit(job)
    record.end_pass(BATCH, {})
    record.computed(job)
    record.finish(job, "finished")


@every_policy
def test_a_client_sees_no_others_name(name: str) -> None:
    replica = EngineModel(FairQueue(make_policy(name)), pool_tokens=40)
    for number in range(6):
        _arrive(replica, str(number), f"secret {number}", prompt=10, output=4)
    _steps(replica, 3)
    for number in range(6):
        text = repr(replica.admission.record.find(str(number), f"secret {number}"))
        assert f"secret {number}" in text
        assert text.count("secret") == 1


def test_the_servers_own_requests_are_not_in_it() -> None:
    record = _record()
    _serve(record, Job("probe", "(system)", system=True))
    assert len(record) == 0
    assert record._running == 0


def test_what_is_known_of_one_that_has_ended() -> None:
    record = _record()
    record.tick(10)
    job = Job("id", "a", prompt_tokens=30, max_output_tokens=9)
    record.arrive(job)
    record.end_pass(MEMORY, {})
    record.tick(12)
    record.admit(job)
    record.end_pass(BATCH, {})
    record.tick(13.5)
    record.computed(job)
    job.extend_tokens, job.cached_tokens, job.output_tokens = 20, 10, 7
    record.tick(20)
    record.finish(job, "aborted")
    record.tick(100)
    found = only(record, "id")
    assert (found["state"], found["outcome"], found["came_s_ago"]) == ("ended", "aborted", 90)
    assert (found["waited_s"], found["waited_for_s"]) == (2, {MEMORY: 2})
    assert (found["prefill_s"], found["decode_s"]) == (1.5, 6.5)
    tokens = ("prompt", "max_output", "extend", "cached", "output")
    assert [found[f"{name}_tokens"] for name in tokens] == [30, 9, 20, 10, 7]


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_time_does_not_go_back(times_s: list[float]) -> None:
    record = _record()
    for time_s in times_s:
        record.tick(time_s)
        assert record.waits.now_ns >= round(time_s * NS)


def _arrive(replica: EngineModel, id: str, client: str, *, prompt: int, output: int) -> None:
    serial = sum(map(ord, id)) * 1000
    tokens = tuple(range(serial, serial + prompt))
    replica.arrive(Request(id, client, tokens, output, output))


def _steps(replica: EngineModel, steps: int) -> None:
    for _ in range(steps):
        replica.step()
