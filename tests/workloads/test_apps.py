"""Interactions of applications, programs that take too long, and what is measured of both."""

from collections.abc import Sequence
from random import Random
from statistics import mean

import numpy as np
import pytest

from workloads.apps import APPS, BY_NAME, Crowd
from workloads.arrivals import EvenArrivals
from workloads.clients import Client
from workloads.programs import Call, Execution, Outcome, Program, Reply
from workloads.records import Manifest, ProgramRecord, RequestRecord, Run
from workloads.served import busiest_minute, limits_of, totals
from workloads.session import TIMED_OUT, Plan
from workloads.simulation import Site, simulate
from workloads.simulation.run import Simulation

TOKEN_BYTES = 4
SMALL = {"kv_tokens": 4096, "max_running": 4, "stall_ms": 0.0}


def calls_of(program: Program, outcome: Outcome = Outcome.OK, fails_at: int = -1) -> list[Call]:
    """The calls of one interaction, of which number `fails_at` ends so."""
    execution, calls, ready = Execution(program), [], []
    ready += execution.start()
    while ready:
        number, call = ready.pop(0)
        calls.append(call)
        ready += execution.reply(number, Reply(outcome=outcome if number == fails_at else Outcome.OK))
    return calls


@pytest.mark.parametrize("app", APPS, ids=lambda app: app.name)
def test_an_interaction_is_a_plan_calls_beside_each_other_and_a_merge(app) -> None:
    all_calls = [calls_of(app.interaction(Random(seed))) for seed in range(300)]
    for calls in all_calls:
        assert app.calls[0] <= len(calls) <= app.calls[1]
        assert [call.last for call in calls] == [False] * (len(calls) - 1) + [True]
        assert len({call.prompt[: TOKEN_BYTES * app.system_tokens] for call in calls}) == 1
        if len(calls) > 1:
            assert [call.stage for call in calls] == ["plan", *["work"] * (len(calls) - 2), "merge"]
    every = [call for calls in all_calls for call in calls]
    assert mean(len(call.prompt) / TOKEN_BYTES for call in every) == pytest.approx(app.input_tokens, rel=0.08)
    assert mean(call.max_output_tokens for call in every) == pytest.approx(app.output_tokens, rel=0.08)


def test_a_call_that_fails_ends_the_interaction() -> None:
    agent = BY_NAME["agent"]
    seed = next(seed for seed in range(99) if len(calls_of(agent.interaction(Random(seed)))) == 5)
    assert len(calls_of(agent.interaction(Random(seed)), Outcome.FAILED, fails_at=0)) == 1
    assert len(calls_of(agent.interaction(Random(seed)), Outcome.FAILED, fails_at=2)) == 4


def test_the_crowd_is_the_same_for_one_seed_and_surges_in_its_part() -> None:
    crowd = Crowd(users=200, median_rpm=1.0, spread=0.5, abusers=3, surge=0.1, surge_factor=10.0)
    one, other = crowd.clients("s", 600.0), crowd.clients("s", 600.0)
    assert [(c.name, c.app, c.arrival_times(until_s=600)) for c in one] == [
        (c.name, c.app, c.arrival_times(until_s=600)) for c in other
    ]
    users = [c for c in one if c.well_behaved]
    times = [t for c in users for t in c.arrival_times(until_s=600)]
    inside = sum(270 <= t < 330 for t in times) / 60
    outside = sum(not 270 <= t < 330 for t in times) / 540
    assert inside / outside == pytest.approx(10, rel=0.15)
    assert [c.name for c in one if not c.well_behaved] == ["abuser0", "abuser1", "abuser2"]
    assert crowd.abuse() == pytest.approx([100, 316.2, 1000], rel=1e-3)


# ---- programs that take too long


def slow(name: str, calls: int, output: int = 400) -> Client:
    def program(index: int) -> Program:
        for number in range(calls):
            reply = yield Call(bytes([number + 1]) * (TOKEN_BYTES * 64), output, last=number == calls - 1)
            if not reply.ok:
                return

    return Client(name, program, EvenArrivals(1.0), "s")


@pytest.mark.parametrize("calls", [1, 3])
def test_a_program_that_takes_too_long_is_given_up(calls: int) -> None:
    site = Site(**SMALL)
    plan = Plan(10.0, drain_s=None, program_timeout_s=5.0, waits=True, connections_per_client=3)
    run = simulate(site, [slow("a", calls), slow("b", calls)], plan)
    assert run.end is not None
    late = [one for one in run.programs if one.outcome == Outcome.FAILED]
    assert late, "the replica is too small for all"
    for one in run.programs:
        assert one.t_done_s is not None
        assert one.t_done_s - one.t_intended_s <= 5.0 + 0.5
    given_up = [one for one in run.requests if one.error == TIMED_OUT]
    assert {(one.client, one.program) for one in given_up} == {(one.client, one.program) for one in late}
    assert len({(one.client, one.program, one.call) for one in run.requests}) == len(run.requests)
    assert all(one.waited_s is not None for one in run.requests if one.outcome == Outcome.OK)
    found = totals(run, ["a", "b"])
    assert (found["interactions"], found["timed_out"], found["throttled"]) == (20, len(late), 0)
    gone = {(one.client, one.program) for one in late}
    spent = sum(
        (one.extend_tokens or 0) + one.output_tokens
        for one in run.requests
        if (one.client, one.program) in gone
    )
    assert found["wasted"] == {"throttled": 0, "timed out": spent}


def test_a_call_that_is_still_thought_about_is_not_made_any_more() -> None:
    def program(index: int) -> Program:
        yield Call(bytes(64), 4)
        yield Call(bytes(64), 4, after_s=10.0)

    thinker = Client("a", program, EvenArrivals(1.0), "s")
    run = simulate(Site(**SMALL), [thinker], Plan(20.0, drain_s=None, program_timeout_s=3.0))
    assert {one.call for one in run.requests} == {0}
    assert {one.outcome for one in run.programs} == {Outcome.FAILED}


def test_nothing_is_left_behind_by_what_was_given_up() -> None:
    from workloads.records import Records
    from workloads.simulation import describe

    site, plan = Site(**SMALL), Plan(8.0, drain_s=None, program_timeout_s=3.0)
    clients: Sequence[Client] = [slow("a", 2), slow("b", 2)]
    with Records(None, describe(site, clients, plan)) as records:
        simulation = Simulation(site, clients, plan, records)
        simulation.run()
    [replica] = simulation.replicas
    assert len(replica.queue) == 0
    assert not list(replica.queue.running())
    replica.check_pool()
    [router] = simulation.routers
    assert router.state()["in_flight"] == 0


# ---- measures from records


def row(client: str, program: int, call: int, t_s: float, **more: object) -> RequestRecord:
    given = {
        "outcome": "ok",
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 2,
        "status": 200,
        **more,
    }
    return RequestRecord(client, program, call, "", t_s, t_s, t_s + 1, t_s + 2, **given)  # type: ignore[arg-type]


def ran(requests: list[RequestRecord], programs: list[tuple[str, int, str]], **clients: str) -> Run:
    facts = {name: {"app": app} for name, app in clients.items()}
    run = Run(Manifest("w", "s", facts, 100.0))
    run.requests = requests
    run.programs = [ProgramRecord(name, index, 0.0, 50.0, 1, 0, outcome) for name, index, outcome in programs]
    return run


def test_a_refused_call_after_an_answered_one_cuts_the_interaction() -> None:
    refused = {"outcome": "failed", "status": 429, "cached_tokens": None, "output_tokens": 0}
    run = ran(
        [
            row("a", 0, 0, 0.0), row("a", 0, 1, 3.0, **refused),
            row("a", 1, 0, 0.0, **refused),
            row("b", 0, 0, 0.0, waited_s=6.0), row("b", 0, 1, 3.0, waited_s=5.0),
        ],
        [("a", 0, "failed"), ("a", 1, "failed"), ("b", 0, "ok")],
    )  # fmt: skip
    found = totals(run, ["a", "b"])
    assert (found["throttled"], found["cut"], found["answered"], found["interactions"]) == (2, 1, 1, 3)
    assert found["wasted"] == {"throttled": 6 + 2, "timed out": 0}
    assert found["delayed"] == {"1": 1.0, "5": 1.0, "20": 0.0}
    assert found["served_part"] == 0.5
    assert found["refused_part"] == 2 / 5


@pytest.mark.slow
def test_limits_are_what_nearly_all_stay_below() -> None:
    requests = [row(f"u{user}", call, 0, 10.0 * call) for user in range(99) for call in range(6)]
    requests += [row("abuser", call, 0, call / 10) for call in range(600)]
    apps = {f"u{user}": "chat" if user < 60 else "code" for user in range(99)} | {"abuser": "code"}
    run = ran(requests, [], **apps)
    assert busiest_minute(np.array([one.t_intended_s for one in requests[:6]])) == 6
    assert limits_of(run, 99) == {"user": 6, "apps": {"chat": 6, "code": 600}}
    assert limits_of(run, 95)["apps"] == {"chat": 6, "code": 6}
    with pytest.raises(ValueError, match="no calls"):
        limits_of(ran([], []), 99)
    with pytest.raises(ValueError, match="percentile"):
        limits_of(run, 0)
