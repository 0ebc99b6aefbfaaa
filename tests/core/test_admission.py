"""Admission: look-ups before a pass, requests that would compute the same, candidates that lost their prefix."""

from array import array
from collections.abc import Iterator

import pytest

from sglang_fair.core import POLICIES, make_policy
from sglang_fair.core.admission import (
    BLOCK_TOKENS,
    CORRECTIONS_PER_PASS,
    DEFERRALS_PER_PASS,
    Admission,
    Match,
    block_of,
)
from sglang_fair.core.fcfs import Lpm
from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.step_times import FIRST_CHUNK_TOKENS
from sglang_fair.core.steps import Steps


class Engine:
    """An admission, and the cache that it looks into: what `matches` says, by the request's id."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.queue = FairQueue(policy or Lpm())
        self.admission = Admission(self.queue, self.match)
        self.matches: dict[str, Match] = {}
        self.looked_up: list[str] = []
        self.cached_tokens = 0

    def match(self, job: Job) -> Match:
        self.looked_up.append(job.id)
        return self.matches.get(job.id, (0, None))

    def arrive(self, id: str, client: str = "a", prefix_tokens: int = 0, block: str | None = None) -> Job:
        self.matches[id] = prefix_tokens, block
        self.admission.arrive(job := Job(id, client, max_output_tokens=10))
        return job

    def begin_pass(self) -> Iterator[Job]:
        """A pass over a cache that has changed."""
        self.cached_tokens += 1
        self.admission.begin_pass(self.cached_tokens)
        return self.admission.candidates()

    def confirm(self, job: Job) -> bool:
        return self.admission.confirm(job, *self.match(job))

    def admit(self, job: Job) -> None:
        self.admission.admit(job, extend_tokens=5, cached_tokens=job.prefix_tokens)

    def offers(self) -> list[str]:
        """Whom one pass offers, if the engine takes nobody."""
        return [job.id for job in self.begin_pass()]


# ---- steps


def test_a_prompt_that_was_cut_leaves_room_for_a_short_one_of_another_client() -> None:
    """But half of the step is its own, and its client's other prompts wait for its end."""
    policy = make_policy("dlpm")
    steps = Steps(0.1)
    queue = FairQueue(policy)
    admission = Admission(queue, lambda job: (0, None), steps)
    long = Job("long", "a", prompt_tokens=10_000, max_output_tokens=10)
    admission.arrive(long)
    admission.begin_pass(1)
    assert admission.chunk_of(long, 2048) == 2048, "nobody else is here"
    assert next(admission.candidates()) is long
    admission.admit(long, extend_tokens=2048, cached_tokens=0)
    admission.arrive(Job("own", "a", prompt_tokens=100, max_output_tokens=10))
    admission.begin_pass(2)
    assert admission.chunk_of(long, 2048) == 2048, "it waits for its own client"
    admission.arrive(Job("short", "b", prompt_tokens=100, max_output_tokens=10))
    admission.begin_pass(3)
    assert admission.chunk_of(long, 2048) == 1948
    assert admission.chunk_of(long, 200) == 100
    assert admission.chunk_of(long, 198) == 198, "half of the step does not do for it"


def cut_prompt(prompt_tokens: int) -> tuple[Admission, Job]:
    """`a`'s prompt was cut, a request of `b` decodes, and a prompt of `c` waits."""
    admission = Admission(FairQueue(make_policy("dlpm")), lambda job: (0, None), Steps(0.1))
    long, runs = (Job(client, client, prompt_tokens=10_000, max_output_tokens=10) for client in "ab")
    admission.arrive(long)
    admission.arrive(runs)
    admission.admit(runs, extend_tokens=10_000, cached_tokens=0)
    admission.computed([runs])
    admission.admit(long, extend_tokens=100, cached_tokens=0)
    admission.computed([long])
    admission.arrive(Job("c", "c", prompt_tokens=prompt_tokens, max_output_tokens=10))
    return admission, long


@pytest.mark.parametrize(
    ("tokens", "can_decode", "goes_on"),
    [
        (FIRST_CHUNK_TOKENS // 2 + 1, True, False),
        (FIRST_CHUNK_TOKENS, True, False),
        (FIRST_CHUNK_TOKENS // 2, True, True),  # there is room beside it
        (FIRST_CHUNK_TOKENS + 1, True, True),  # there is no room without it either
        (FIRST_CHUNK_TOKENS, False, True),  # the engine would do nothing, should `c` not be admitted
    ],
)
def test_a_prompt_that_was_cut_gives_way_to_another_client_s_that_has_room_without_it(
    tokens: int, can_decode: bool, goes_on: bool
) -> None:
    """In every second step at most."""
    admission, long = cut_prompt(tokens)
    for number in range(4):
        admission.begin_pass(number, lambda: can_decode)
        assert admission.goes_on(long) == (goes_on or number % 2 == 1)
        assert [job.id for job in admission.candidates()] == ["c"]


@pytest.mark.parametrize(("tokens", "goes_on"), [(FIRST_CHUNK_TOKENS, False), (FIRST_CHUNK_TOKENS + 1, True)])
def test_a_prompt_that_was_cut_waits_for_the_target_unless_a_long_one_waits_for_its_end(
    tokens: int, goes_on: bool
) -> None:
    admission, long = cut_prompt(tokens)
    assert admission.steps is not None
    admission.step(0.08, decoded=8, requests=1)
    for number in range(2):  # `a` runs more than `b`
        admission.arrive(more := Job(f"more {number}", "a", prompt_tokens=10, max_output_tokens=10))
        admission.admit(more, extend_tokens=10, cached_tokens=0)
        admission.computed([more])
    for step_s, is_held in ((0.01, False), (0.05, True)):
        for _ in range(30):
            admission.step(step_s, decoded=1)
        assert admission.steps.holds_back(Job("", "a")) == is_held
    for number in range(4):
        admission.begin_pass(number)
        assert admission.goes_on(long) == goes_on


def test_steps_for_prompts_where_memory_is_too_short_for_a_decode_step_are_nobody_s_lag() -> None:
    """Regression: the lag grew with each of them, over its bound."""
    admission, _ = cut_prompt(100)
    steps = admission.steps
    assert steps is not None
    for number in range(9):
        room = number not in (3, 4, 5)
        admission.begin_pass(number, lambda room=room: room)
        offered = [job.id for job in admission.candidates()]
        assert bool(offered) == (number < 2 or not room)
        admission.step(0.1, {"c": 100}) if offered else admission.step(0.001, decoded=1)
    assert 0 < steps.largest_lag_s <= steps.bound_s


def test_no_room_is_left_for_a_prompt_that_waits_for_what_the_cut_one_computes() -> None:
    """It is passed over in the same pass; the room would be lost."""
    admission = Admission(FairQueue(make_policy("dlpm")), lambda job: (0, "first"), Steps(0.1))
    long = Job("long", "a", prompt_tokens=10_000, max_output_tokens=10)
    admission.arrive(long)
    admission.begin_pass(1)
    admission.admit(long, extend_tokens=2048, cached_tokens=0)
    admission.computed([long])
    admission.arrive(Job("short", "b", prompt_tokens=100, max_output_tokens=10))
    admission.begin_pass(2)
    assert admission.chunk_of(long, 2048, "another") == 1948
    assert admission.chunk_of(long, 2048, "first") == 2048
    admission.extend(long, 2048, "first")
    assert list(admission.candidates()) == []


def test_a_prompt_that_was_cut_waits_while_those_that_run_have_their_turn() -> None:
    """And nobody is offered in that pass, unless those that run could not decode."""
    steps = Steps(0.1)
    admission = Admission(FairQueue(make_policy("dlpm")), lambda job: (0, None), steps)
    runs, long = (Job(name, name, prompt_tokens=100, max_output_tokens=10) for name in "ab")
    for job in (runs, long, Job("c", "c", prompt_tokens=1, max_output_tokens=1)):
        admission.arrive(job)
    admission.admit(runs, extend_tokens=100, cached_tokens=0)
    admission.computed([runs])
    admission.step(0.01, {"a": 100})
    admission.admit(long, extend_tokens=50, cached_tokens=0)
    admission.computed([long])
    admission.step(0.1, {"b": 50})
    admission.begin_pass(1)
    assert not admission.goes_on(long)
    assert list(admission.candidates()) == []
    assert steps.held == 1
    admission.begin_pass(1, can_decode=lambda: False)
    assert admission.goes_on(long)
    assert [job.id for job in admission.candidates()] == ["c"]
    admission.step(0.1, decoded=10)
    admission.begin_pass(1)
    assert admission.goes_on(long)


# ---- requests that would compute the same


@pytest.mark.parametrize("name", [name for name in POLICIES if make_policy(name).waits_for_prefixes])
def test_a_shared_prefix_is_computed_once(name):
    engine = Engine(make_policy(name, quantum=100))
    one = engine.arrive("1", "a", block="prefix")
    two = engine.arrive("2", "b", block="prefix")
    other = engine.arrive("3", "b", block="else")
    candidates = engine.begin_pass()
    assert next(candidates) is one
    engine.admit(one)
    assert engine.admission.is_being_computed(two)
    assert not engine.admission.is_being_computed(other)
    assert not engine.admission.is_being_computed(one)
    assert list(candidates) == [other]
    engine.admission.computed([one])
    assert not engine.admission.is_being_computed(two)
    assert sorted(engine.offers()) == ["2", "3"]


@pytest.mark.parametrize("end", ["computed", "finish", "retract", "next chunk"])
def test_nobody_waits_for_a_prefix_that_is_not_computed_any_more(end):
    engine = Engine()
    one, two = (engine.arrive(id, block="prefix") for id in "12")
    assert next(engine.begin_pass()) is one
    engine.admit(one)
    assert engine.admission.is_being_computed(two)
    match end:
        case "computed":
            engine.admission.computed([one])
        case "finish":
            engine.admission.finish(one)
        case "retract":
            engine.admission.retract(one)
        case _:
            engine.admission.extend(one, 5, "behind the prefix")
    assert not engine.admission.is_being_computed(two)
    assert "2" in engine.offers()


def test_who_waited_in_vain_does_not_wait_again():
    """The cache did not keep the prefix, so the next computation of it is not waited for."""
    engine = Engine()
    twins = [engine.arrive(str(number), block="block") for number in range(3)]
    candidates = engine.begin_pass()
    engine.admit(next(candidates))
    assert list(candidates) == []  # both wait for the first
    assert engine.offers() == []  # for as long as it takes
    engine.admission.computed([twins[0]])
    candidates = engine.begin_pass()
    engine.admit(next(candidates))
    assert next(candidates) is twins[2]  # nothing was kept, so it is not held up by the second
    engine.admission.looked_up(twins[2], 5, "block")
    assert engine.admission.is_being_computed(twins[2])  # something was


def test_a_pass_ends_when_too_many_wait_for_the_same_prefix(monkeypatch):
    """However many share it, a pass considers a bounded number of them."""
    engine = Engine()
    for number in range(1000):
        job = engine.arrive(str(number), block="block")
        engine.admission.looked_up(job, 0, "block")
    candidates = engine.begin_pass()
    engine.admit(next(candidates))
    considered = []
    is_being_computed = engine.admission.is_being_computed
    monkeypatch.setattr(
        engine.admission, "is_being_computed", lambda job: considered.append(job) or is_being_computed(job)
    )
    assert list(candidates) == []
    assert list(engine.admission.candidates()) == []
    assert len(considered) == DEFERRALS_PER_PASS


def test_two_that_compute_the_same_do_not_block_it_for_ever():
    """An engine may admit both; whichever began first says when it is over."""
    engine = Engine()
    jobs = [engine.arrive(id) for id in "123"]
    for job in jobs:
        engine.admission.looked_up(job, 0, "prefix")
    for job in jobs[:2]:
        engine.admit(job)
    engine.admission.finish(jobs[1])
    assert engine.admission.is_being_computed(jobs[2])
    engine.admission.computed([jobs[0]])
    assert not engine.admission.is_being_computed(jobs[2])
    assert engine.admission._prefixes._computing == {}


def test_a_candidate_whose_prefix_has_begun_to_be_computed_is_passed_over():
    """Its look-up was older than the batch: only the engine's own one shows what it shares."""
    engine = Engine()
    one, two = engine.arrive("1", block="prefix"), engine.arrive("2", block="old")
    candidates = engine.begin_pass()
    assert next(candidates) is one
    assert engine.confirm(one)
    engine.admit(one)
    assert next(candidates) is two
    engine.matches["2"] = 0, "prefix"
    assert not engine.confirm(two)
    assert list(candidates) == []


# ---- candidates that are worse than thought


def test_a_candidate_that_lost_its_prefix_is_offered_again_in_its_place():
    engine = Engine()
    best, second = engine.arrive("best", prefix_tokens=9), engine.arrive("second", prefix_tokens=5)
    candidates = engine.begin_pass()
    engine.matches["best"] = 2, None
    assert next(candidates) is best
    assert not engine.confirm(best)
    assert next(candidates) is second
    assert engine.confirm(second)
    engine.admit(second)
    assert next(candidates) is best
    assert engine.confirm(best)


def test_a_candidate_that_lost_tokens_and_is_still_first_is_admitted():
    engine = Engine()
    best = engine.arrive("best", prefix_tokens=9)
    engine.arrive("second", prefix_tokens=5)
    next(engine.begin_pass())
    engine.matches["best"] = 6, None
    assert engine.confirm(best)
    assert best.prefix_tokens == 6


def test_corrections_are_bounded():
    """Where the whole cache was lost, a pass does not try everybody."""
    engine = Engine()
    for number in range(50):
        engine.arrive(str(number), prefix_tokens=100 - number)
    candidates = engine.begin_pass()
    engine.matches.clear()
    refused = 0
    while not engine.confirm(next(candidates)):
        refused += 1
    assert refused == CORRECTIONS_PER_PASS


def test_a_candidate_that_is_neither_admitted_nor_refused_is_passed_over():
    engine = Engine()
    jobs = [engine.arrive(id) for id in "123"]
    assert list(engine.begin_pass()) == jobs
    assert engine.offers() == ["1", "2", "3"]
    engine.admission.leave(jobs[0])
    assert engine.offers() == ["2", "3"]


# ---- look-ups


def test_who_comes_is_looked_up_once_and_again_when_its_prefix_may_have_grown():
    engine = Engine()
    one, two = engine.arrive("1", block="prefix"), engine.arrive("2", block="prefix")
    assert next(engine.begin_pass()) is one
    engine.admit(one)
    engine.admission.computed([one])
    engine.looked_up.clear()
    engine.matches["2"] = 5, "behind"
    assert engine.offers() == ["2"]
    assert two.prefix_tokens == 5
    assert engine.looked_up == ["2"]


# ---- what identifies a block


def test_a_block_is_the_first_uncached_tokens_and_two_parts_of_the_prefix():
    tokens = memoryview(array("I", range(500)))
    block = block_of(tokens, 100, "root")
    assert block[:2] == (100, "root")
    assert [memoryview(part).cast("I")[0] for part in block[2:]] == [100, 0, 50]
    assert {len(part) for part in block[2:]} == {4 * BLOCK_TOKENS}
    assert block_of(tokens[: 100 + BLOCK_TOKENS - 1], 100) is None
    assert block_of(tokens[: 100 + BLOCK_TOKENS], 100) is not None
