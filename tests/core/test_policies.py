"""What every policy owes its callers, asked of each one in the registry: a new policy is tested by being listed."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core import POLICIES, make_policy, options_of
from sglang_fair.core.job import Job
from sglang_fair.core.payers import RULES, make_payers
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.slo import LARGEST_EVICTIONS
from tests.support.budget import examples
from tests.support.engine_model import ClientHabit, EngineCase, EngineModel, Request, Traffic
from tests.support.twins import Script

CONFORMANCE = settings(max_examples=examples(20))
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))
BOUNDED = ("vtc", "vtc-oracle", "drr", "dlpm", "dlpm-predict", "wsc", "wsc-dlpm", "slo")
"""Policies that limit the difference between two clients. Tests of theorems hold each of them to its bound."""
seeds = st.integers(0, 2**32)


SMALL = {"remembered_clients": 2, "limit": 5, "min_quantum": 2, "max_quantum": 200, "horizon_tokens": 20}
"""Options with which a short test sees what they do."""


def make(name: str, quantum: float = 20) -> Policy:
    options = {option: SMALL[option] for option in options_of(name) if option in SMALL}
    return make_policy(name, quantum=quantum, weights=Weights({"b": 2.0}), **options)


@every_policy
@CONFORMANCE
@given(seed=seeds)
def test_every_job_is_offered_once(name, seed):
    """After any history, releasing and admitting to the end gives exactly the jobs that wait."""
    script = Script(make(name), seed, sessions=seed % 4).run()
    script.release()
    expected = sorted(script.waiting)
    script.picks.clear()
    while (job := script.pick()) is not None:
        script.admit(job, 7)
    assert sorted(pick for pick in script.picks if pick is not None) == expected
    assert not script.waiting


@every_policy
@CONFORMANCE
@given(seed=seeds)
def test_only_a_held_client_whose_turn_it_is_stops_a_pass(name, seed):
    """Work conservation: None with somebody waiting who is not held means that without the held jobs there
    would be an offer."""
    script, random = Script(make(name), seed, holds=False, sessions=seed % 4).run(), Random(seed)
    while len(script.held) < len(script.waiting):
        job = script.pick()
        if job is None:
            for held in list(script.held):
                script.abort(held)
            assert script.pick() is not None
            break
        if random.random() < 0.5:
            script.hold(job)
        else:
            script.admit(job, 11)
    else:
        assert script.pick() is None


@every_policy
@CONFORMANCE
@given(seed=seeds)
def test_names_do_not_matter(name, seed):
    """Ties are settled by arrival: calling the clients differently changes nothing."""
    plain = make_policy(name, quantum=20)
    renamed = make_policy(name, quantum=20)
    other = {"a": "zeta", "b": "x", "c": "alpha", "d": ""}
    picks = Script(renamed, seed, rename=lambda client: f"client-{other[client]}").run().picks
    assert picks == Script(plain, seed).run().picks


@every_policy
@CONFORMANCE
@given(seed=seeds)
def test_a_pass_without_admissions_leaves_no_trace(name, seed):
    """A pass that holds everybody it is offered, and looks everybody's prefix up to another length and back:
    the order does not depend on how the queue is laid out."""

    def noise(script: Script) -> None:
        policy = script.policy
        for job in script.waiting.values():
            job.prefix_tokens += 5
            policy.rematch(job)
            job.prefix_tokens -= 5
            policy.rematch(job)
        while (job := policy.pick()) is not None:
            policy.hold(job)
        policy.release()

    quiet = Script(make(name), seed, holds=False, sessions=seed % 4).run()
    noisy = Script(make(name), seed, holds=False, before_pick=noise, sessions=seed % 4).run()
    assert noisy.picks == quiet.picks
    assert noisy.policy.counters() == quiet.policy.counters()


@every_policy
def test_held_jobs_come_back_in_order_and_may_leave(name):
    script = Script(make(name), 0)
    jobs = [script.arrive("a") for _ in range(4)]
    for job in jobs:
        assert script.pick() is job
        script.hold(job)
    assert script.pick() is None
    script.abort(jobs[1])
    assert script.pick() is None
    jobs[3].prefix_tokens = 0
    script.policy.rematch(jobs[3])
    assert script.pick() is None, "a look-up does not undo a hold"
    script.release()
    for job in (jobs[0], jobs[2], jobs[3]):
        assert script.pick() is job
        script.admit(job, 1)
    assert script.pick() is None


@every_policy
def test_a_longer_prefix_changes_the_order_only_where_locality_counts(name):
    script = Script(make(name), 0)
    first, second = script.arrive("a"), script.arrive("a")
    assert script.pick() is first
    second.prefix_tokens = 8
    script.policy.rematch(second)
    assert script.pick() is (second if "lpm" in name or name == "slo" else first)


@every_policy
def test_who_is_gone_is_forgotten(name):
    """A thousand clients, half of which are served one request and half of which leave while they wait, leave no more
    behind than a hundred."""

    def pickled_after(clients: int) -> int:
        queue = FairQueue(make(name, quantum=0.5 if POLICIES[name].scales else 50))
        for number in range(clients):
            queue.tick(30 * number)
            queue.arrive(job := Job(str(number), f"client{number}", max_output_tokens=5))
            queue.begin_pass()
            offered = queue.next()
            assert offered is job
            queue.admit(job, extend_tokens=40, cached_tokens=0)
            queue.account.emit(job, 5)
            queue.finish(job.id)
            queue.arrive(left := Job(f"left{number}", f"left{number}"))
            if number % 3 == 0:
                queue.begin_pass()
                assert queue.next() is left
            queue.leave(left.id)
        assert len(queue.policy.counters()) <= 6
        queue.account.ledger._accounts.clear()  # bounded by its own limit
        if hasattr(queue.policy, "normal"):  # so is this
            del queue.policy.normal
        return len(pickle.dumps(queue))

    assert pickled_after(1000) <= pickled_after(100) + 500


TYPICAL = EngineCase(
    loads=(
        ClientHabit("a", 8, families=2, shared_tokens=6, private=False),
        ClientHabit("b", 3, 5, 4, families=2, shared_tokens=6, private=False, abort_every=7),
        ClientHabit("c", 2, closed=True, shared_tokens=0),
    ),
    pool_tokens=80,
    cache_tokens=64,
    page_tokens=1,
    step_tokens=20,
    block_tokens=2,
    seed=7,
    steps=80,
)


def decisions(name: str, seed: int) -> list[str]:
    """What a scheduler decided of a case that has everything: names that come once, weights that change, requests that
    are aborted and taken back, shared prices, a cache too small, chunks, passes in which many are put off."""
    random, rule = Random(seed), RULES[seed % len(RULES)]
    queue = FairQueue(make(name), payers=make_payers(rule))
    replica = EngineModel(queue, pool_tokens=80, cache_tokens=48, step_tokens=20, block_tokens=2)
    traffic = Traffic(replace(TYPICAL, seed=seed))
    told = []
    for step in range(60):
        traffic.step(replica)
        tokens = tuple(random.randrange(3) for _ in range(random.randint(1, 6)))
        replica.arrive(Request(f"once {step}", f"name {random.randrange(100)}", tokens, 3, 5))
        if step % 20 == 10:
            queue.account.set_weights({"a": random.choice([0.5, 1.5]), "name 7": 3.0})
        running = [job.id for job in queue.running()]
        if running and random.random() < 0.2:
            replica.retract(random.choice(running))
        replica.step()
        told.append(json.dumps(queue.status()))
    return [*told, *map(str, replica.admissions), *replica.refused]


def fingerprints() -> dict[str, str]:
    """Of every policy's decisions, with each rule of who pays."""
    made = {
        name: "\n".join(line for seed in range(len(RULES)) for line in decisions(name, seed))
        for name in POLICIES
    }
    return {name: hashlib.sha256(lines.encode()).hexdigest() for name, lines in made.items()}


@pytest.mark.slow
def test_schedulers_that_are_fed_alike_decide_alike():
    """The ranks of one replica are processes of their own, and all must form the same batches. Sets and dictionaries of
    strings are laid out differently in each, objects lie at other addresses, and clocks show other times."""
    program = (
        "import json; from tests.core.test_policies import fingerprints; print(json.dumps(fingerprints()))"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    found = [json.loads(rank.communicate()[0]) for rank in ranks]
    assert found[0] == found[1] == fingerprints()


@every_policy
def test_counters_and_bound_can_be_shown(name):
    script = Script(make(name), 1).run()
    assert json.loads(json.dumps(dict(script.policy.counters()))) == script.policy.counters()
    small, large = script.policy.bound(10, 20), script.policy.bound(100, 20)
    assert (small is None and large is None) or 0 < small < large
    assert (small is not None) == (name in BOUNDED)


NO_NUMBERS = (-1, float("nan"), float("inf"))
REFUSED = (
    ("dlpm", "quantum", (0, *NO_NUMBERS), "quantum must be a positive number"),
    ("drr", "quantum", (0, *NO_NUMBERS), "quantum must be a positive number"),
    ("dlpm", "newcomers", NO_NUMBERS, "newcomers must be a number"),
    ("dlpm", "borrow", NO_NUMBERS, "borrow must be"),
    ("dlpm", "patience", (0,), "patience must be at least one"),
    ("vtc-noisy", "noise_percent", (-1, 101, float("nan")), "noise must be between 0 and 100 percent"),
    ("vtc-predict", "remembered_clients", (0,), "at least one output and one client"),
    ("rpm", "limit", (0,), "limit must be at least one request per minute, not 0"),
    ("rpm", "excess", ("drop",), "excess is one of refuse, delay, not 'drop'"),
    ("slo", "evictions", (-1, LARGEST_EVICTIONS + 1), "evictions must be from 0 to 16"),
    ("wsc", "lead", (-1.0, float("nan")), "lead"),
    ("wsc", "spread", (0.5,), "spread"),
    ("wsc", "charge", ("never",), "charge"),
    ("wsc", "input_price", (0.0,), "input_price"),
    ("wsc", "output_price", (-1.0,), "output_price"),
    ("wsc", "system_price", (float("inf"),), "system_price"),
)


@pytest.mark.parametrize(("name", "option", "values", "said"), REFUSED)
def test_bad_options_are_refused(name, option, values, said):
    for value in values:
        with pytest.raises(ValueError, match=said):
            make_policy(name, **{option: value})


def test_bad_parameters_are_refused():
    with pytest.raises(ValueError, match=r"unknown policy 'fair'; there are dlpm, .*fcfs, .*lpm, .*vtc"):
        make_policy("fair")
    for weight in (0, -1, float("nan"), float("inf"), True, "2", None):
        with pytest.raises(ValueError, match="weight of client 'a'"):
            Weights({"a": weight})
    assert make_policy("fcfs", quantum=5).name == "fcfs"
