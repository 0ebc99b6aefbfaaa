"""The rules of a session of load, by a clock and a server that are written down here: no sockets and no engine."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any

import pytest

from workloads.arrivals import EvenArrivals
from workloads.clients import Client
from workloads.programs import Call, Outcome, Program, Reply
from workloads.records import ProgramRecord, RequestRecord
from workloads.session import (
    AFTER_FAILURE_S,
    RUN_ENDED,
    Action,
    Ending,
    Plan,
    Record,
    Request,
    Send,
    Session,
    Wait,
)


class World:
    """A clock, and a server that takes `takes_s` for each request and fails those of `fails`."""

    def __init__(self, clients: list[Client], plan: Plan, *, takes_s: float = 1.0, fails: str = "") -> None:
        self.session = Session(clients, plan)
        self.takes_s, self.fails = takes_s, fails
        self.now_s = 0.0
        self.records: list[RequestRecord | ProgramRecord] = []
        self.sent: list[tuple[float, str]] = []
        self._events: list[tuple[float, int, Callable[[Any], list[Action]], Any]] = []
        self._numbers = iter(range(1_000_000))

    def run(self) -> "World":
        self._carry_out(self.session.start())
        while self._events and not self.session.over:
            self.now_s, _, happens, what = heappop(self._events)
            self._carry_out(happens(what))
        if self.session.over:
            for request in list(self.session.under_way):
                how = Ending(Reply(outcome=Outcome.CANCELLED), error=RUN_ENDED)
                self._carry_out(self.session.ended(request, how, self.now_s))
            self._carry_out(self.session.cut_off())
        return self

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Wait(until_s, what):
                    self._at(until_s, lambda what: self.session.due(what, self.now_s), what)
                case Send(request):
                    self.sent.append((self.now_s, request.client))
                    self._at(self.now_s + self.takes_s, self._answer, request)
                case Record(row):
                    self.records.append(row)

    def _at(self, time_s: float, happens: Callable[[Any], list[Action]], what: Any) -> None:
        heappush(self._events, (time_s, next(self._numbers), happens, what))

    def _answer(self, request: Request) -> list[Action]:
        failed = request.client == self.fails
        reply = Reply(outcome=Outcome.FAILED if failed else Outcome.OK)
        return self.session.ended(request, Ending(reply, output_tokens=3), self.now_s)

    @property
    def requests(self) -> list[RequestRecord]:
        return [row for row in self.records if isinstance(row, RequestRecord)]

    @property
    def programs(self) -> list[ProgramRecord]:
        return [row for row in self.records if isinstance(row, ProgramRecord)]


def one_call(_: int) -> Program:
    yield Call("Why?", 3)


def client(name: str = "a", program: Any = one_call, rate_per_s: float = 1.0, **more: Any) -> Client:
    return Client(name, program, EvenArrivals(rate_per_s, first_s=0.0), seed="0", **more)


def test_programs_of_the_open_loop_arrive_whatever_the_server_does():
    world = World([client()], Plan(5.0, drain_s=None), takes_s=100.0).run()
    assert [sent_s for sent_s, _ in world.sent] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [record.t_done_s - record.t_intended_s for record in world.requests] == [100.0] * 5
    assert {program.outcome for program in world.programs} == {"ok"}


def test_calls_of_one_step_are_due_together_and_each_after_its_own_thinking_time():
    def talk(_: int) -> Program:
        yield Call("Why?", 3)
        yield Call("And then?", 3, after_s=0.5), Call("But?", 3)

    world = World([client(program=talk)], Plan(1.0, drain_s=None)).run()
    assert sorted(record.t_intended_s for record in world.requests) == [0.0, 1.0, 1.5]
    assert all(record.t_start_s == record.t_intended_s for record in world.requests)
    [program] = world.programs
    assert (program.requests, program.t_done_s) == (3, 2.5)


def test_a_connection_that_is_free_goes_to_the_request_that_waits_longest():
    def five(_: int) -> Program:
        yield tuple(Call(str(number), 3, str(number)) for number in range(5))

    plan = Plan(1.0, drain_s=None, connections_per_client=2)
    world = World([client(program=five), client("b")], plan).run()
    starts = {record.stage: record.t_start_s for record in world.requests if record.client == "a"}
    assert starts == {"0": 0.0, "1": 0.0, "2": 1.0, "3": 1.0, "4": 2.0}
    assert [record.t_start_s for record in world.requests if record.client == "b"] == [0.0], "it has its own"


def test_a_closed_loop_keeps_its_programs_under_way_until_arrivals_end():
    plan = Plan(3.5, drain_s=None, at_once={"a": 2})
    world = World([client()], plan).run()
    assert [program.t_intended_s for program in world.programs] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    changes = sorted(change for p in world.programs for change in ((p.t_intended_s, 1), (p.t_done_s, -1)))
    assert max(accumulate(change for _, change in changes)) == 2
    assert world.now_s == 4.0


def test_a_closed_loop_has_no_more_programs_than_the_plan_allows():
    world = World([client()], Plan(100.0, 5, drain_s=None, at_once={"a": 2})).run()
    assert sorted(program.program for program in world.programs) == [0, 1, 2, 3, 4]
    assert world.now_s == 3.0, "nothing is left to wait for"


def test_who_is_refused_at_once_waits_before_the_next_program():
    plan = Plan(2.5, drain_s=None, at_once={"a": 1})
    world = World([client()], plan, takes_s=0.0, fails="a").run()
    assert [program.t_intended_s for program in world.programs] == [0.0, AFTER_FAILURE_S, 2 * AFTER_FAILURE_S]
    assert {(program.outcome, program.failed) for program in world.programs} == {("failed", 1)}


def test_after_the_drain_the_rest_is_cancelled():
    def twice(_: int) -> Program:
        yield Call("Why?", 3)
        yield Call("And then?", 3)

    world = World([client(program=twice)], Plan(2.0, drain_s=0.5), takes_s=1.4).run()
    assert world.now_s == 2.5
    assert [(record.outcome, record.t_done_s) for record in world.requests] == [
        ("ok", 1.4),
        ("ok", 2.4),
        ("cancelled", 2.5),
        ("cancelled", 2.5),
    ]
    assert {(program.outcome, program.t_done_s) for program in world.programs} == {("cancelled", None)}
    progress = world.session.progress
    assert (progress.programs_due, progress.programs_done, progress.ok, progress.cancelled) == (2, 0, 2, 2)
    assert (progress.in_flight, progress.output_tokens) == (0, 6)


def test_a_session_waits_for_well_behaved_clients_alone_if_the_plan_says_so():
    clients = [client("good"), client("bad", well_behaved=False, rate_per_s=2.0)]
    plan = Plan(2.0, drain_s=None, drain_for="well-behaved", connections_per_client=1)
    world = World(clients, plan).run()
    assert world.now_s == 2.0
    outcomes = {name: [p.outcome for p in world.programs if p.client == name] for name in ("good", "bad")}
    assert outcomes["good"] == ["ok", "ok"]
    assert "cancelled" in outcomes["bad"]
    waiting = [record for record in world.requests if record.t_start_s is None]
    assert waiting
    assert {(record.client, record.outcome) for record in waiting} == {("bad", "cancelled")}


def test_a_session_that_is_stopped_takes_nothing_but_requests_whose_time_had_come():
    session = Session([client()], Plan(1.0, drain_s=None))
    [arrival, *_] = (action.what for action in session.start())
    [wait] = session.due(arrival, 0.0)
    session.stop()
    assert session.due(arrival, 0.0) == []
    assert session.due(wait.what, 0.0) == [Send(wait.what)]
    [record] = session.ended(wait.what, Ending(Reply(outcome=Outcome.CANCELLED)), 0.0)
    [program] = session.cut_off()
    assert (record.row.outcome, program.row.outcome, session.over) == ("cancelled", "cancelled", True)


def test_clients_are_checked():
    with pytest.raises(ValueError, match="names of their own"):
        Session([client(), client()], Plan(1.0))
    with pytest.raises(ValueError, match=r"no such clients for the closed loop: \['b'\]"):
        Session([client()], Plan(1.0, at_once={"b": 1}))
    with pytest.raises(ValueError, match="at least 1 program"):
        Plan(1.0, at_once={"a": 0})
