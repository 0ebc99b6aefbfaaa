"""A session of load: clients' programs from their arrival to their last answer, without a clock and without a wire.

Two clocks drive it. The live driver has the wall clock and sockets, the simulator a heap of events and modelled
engines. Both do the same: hand in what happens, with the time at which it happens, and carry out the actions that
come back, in their order.

    session.start()                    -> the first timers
    session.due(what, now_s)           a timer has run out
    session.ended(request, how, now_s) a request was answered, refused, or broke off
    session.stop()                     the run ends early
    session.cut_off()                  last of all: records of the programs that the end interrupted

The rules of a run are here and nowhere else. Open-loop programs arrive whatever the server does; a closed-loop client
keeps a fixed number of programs under way. A client has a bounded number of connections, and its requests wait for
one in order. Latency counts from `t_intended_s`, the moment at which a request could have been sent. When arrivals
have ended, the session waits for the programs that the plan names, `drain_s` at most, and is `over`.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from workloads.clients import Client
from workloads.programs import Call, Execution, Outcome, Ready, Reply
from workloads.records import ProgramRecord, RequestRecord

AFTER_FAILURE_S = 1.0
"""How long a closed-loop client waits before it replaces a program that failed, so that a server that refuses at
once is not flooded."""

RUN_ENDED = "the run ended"
"""The error in the records of requests that the end of the run cut off."""

TIMED_OUT = "the program took too long"
"""The error in the records of requests whose program was given up."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run lasts and how it ends."""

    duration_s: float
    programs_per_client: int | None = None
    at_once: Mapping[str, int] = field(default_factory=dict)
    """Closed-loop clients, with how many programs each keeps under way. The others follow their arrivals."""
    drain_s: float | None = 0.0
    """How long to wait for `drain_for` after the last arrival; the rest is cancelled. None: for ever."""
    drain_for: Literal["all", "well-behaved"] = "all"
    connections_per_client: int = 256
    sample_s: float = 0.5
    """Interval between two samples of the replicas' accounts (`/fair`)."""
    token_step_s: float = 0.0
    """Minimum interval between the recorded tokens of an answer, so that long runs fit into memory. The first and the
    last token are always recorded."""
    program_timeout_s: float | None = None
    """A program that takes longer is given up: its requests are cancelled, and it has failed."""
    waits: bool = False
    """Record how long each request waited in its replica, where that is known."""

    def __post_init__(self) -> None:
        if self.duration_s <= 0 or self.connections_per_client < 1 or self.sample_s <= 0:
            raise ValueError(f"durations and connections must be positive: {self}")
        if self.program_timeout_s is not None and not self.program_timeout_s > 0:
            raise ValueError(f"a program's time-out must be positive, not {self.program_timeout_s!r}")
        if any(places < 1 for places in self.at_once.values()):
            raise ValueError(f"a closed loop needs at least 1 program under way: {dict(self.at_once)}")


@dataclass(slots=True)
class SessionProgress:
    """How far a session is, for people who watch it."""

    now_s: float = 0.0
    programs_due: int = 0
    """Known so far: all open-loop programs, and those closed-loop ones that have begun."""
    programs_done: int = 0
    in_flight: int = 0
    """Requests whose time has come and that have not ended."""
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    output_tokens: int = 0


@dataclass(slots=True, eq=False)
class ActiveProgram:
    """One program under way."""

    client: Client
    index: int
    number: int
    """Of all programs of the session, in the order in which they began."""
    t_intended_s: float
    execution: Execution
    failed: int = 0
    requests: dict["Request", None] = field(default_factory=dict)
    """Those whose time has come and that have not ended."""
    timed_out: bool = False

    def record(self, t_done_s: float | None, outcome: Outcome) -> ProgramRecord:
        """Its record; `t_done_s` is None where the run ended first."""
        return ProgramRecord(
            client=self.client.name,
            program=self.index,
            t_intended_s=round(self.t_intended_s, 6),
            t_done_s=None if t_done_s is None else round(t_done_s, 6),
            requests=self.execution.calls,
            failed=self.failed,
            outcome=outcome.value,
        )


@dataclass(slots=True, eq=False)
class Request:
    """One call of a program. As a timer: the time at which it may be sent has come."""

    program: ActiveProgram
    number: int
    call: Call
    t_intended_s: float
    t_start_s: float | None = None
    id: str = ""
    """A name for it, if whoever drives the session needs one."""

    @property
    def client(self) -> str:
        return self.program.client.name


Timer: TypeAlias = Request | Callable[[], None]
"""What is to happen: this request may be sent, or whatever the session does then."""


class Wait(NamedTuple):
    """Action: call `due(what)` at `until_s`. Timers of one instant run out in the order in which they were set."""

    until_s: float
    what: Timer


class Send(NamedTuple):
    """Action: send this request; it has a connection."""

    request: Request


class Cancel(NamedTuple):
    """Action: give this request up, which was sent. `ended` follows, at once or when it has."""

    request: Request


class Record(NamedTuple):
    """Action: keep this record."""

    row: RequestRecord | ProgramRecord


Action: TypeAlias = Wait | Send | Cancel | Record


@dataclass(slots=True)
class Ending:
    """How a request ended, as whoever sent it saw it. `reply` has the outcome; the other fields are the record's."""

    reply: Reply
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    token_times: Sequence[tuple[float, int]] = ()
    worker: str | None = None
    status: int | None = None
    error: str | None = None
    waited_s: float | None = None


class Session:
    """One session, as the module describes it. Times are seconds since its start, and never decrease."""

    def __init__(self, clients: Sequence[Client], plan: Plan) -> None:
        """Raises ValueError for clients without a name of their own, or a closed loop of unknown clients."""
        names = [client.name for client in clients]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"a run needs clients with names of their own, not {names}")
        if unknown := plan.at_once.keys() - set(names):
            raise ValueError(f"no such clients for the closed loop: {sorted(unknown)}")
        self.progress = SessionProgress()
        self.under_way: dict[Request, None] = {}
        """Requests whose time has come and that have not ended, in order. Some wait for a connection."""
        self._clients = clients
        self._plan = plan
        self._programs: dict[ActiveProgram, None] = {}
        self._connections = dict.fromkeys(names, 0)
        self._queued: dict[str, deque[Request]] = {name: deque() for name in names}
        """Requests that wait for one of their client's connections."""
        self._begun = dict.fromkeys(plan.at_once, 0)
        """Programs of each closed-loop client so far."""
        self._programs_begun = 0
        self._open_loop = True
        """Open-loop programs are still to come."""
        self._awaited = 0
        """Programs under way for which the end of the session waits."""
        self._draining = False
        self._over = False
        self._now_s = 0.0
        self._actions: list[Action] = []
        """Of the call that is being answered."""

    @property
    def over(self) -> bool:
        """The session has ended. Requests that are under way are cancelled by whoever drives it."""
        return self._over

    # ---- what happens

    def start(self) -> list[Action]:
        """Arrivals, the first programs of the closed loop, and the deadlines."""
        plan = self._plan
        for client in self._clients:
            for _ in range(plan.at_once.get(client.name, 0)):
                self._wait(0.0, partial(self._refill, client))
        due = _arrivals(self._clients, plan)
        self.progress.programs_due = len(due)
        for t_s, place, index in due:
            self._wait(t_s, partial(self._begin, self._clients[place], index, t_s))
        last_s = due[-1][0] if due else 0.0
        open_until_s = last_s if plan.programs_per_client is not None else plan.duration_s
        self._wait(open_until_s, self._end_open_loop)
        self._wait(plan.duration_s, self._end_arrivals)
        return self._taken()

    def due(self, what: Timer, now_s: float) -> list[Action]:
        """A timer has run out. When the session is over, only requests are taken, so that each whose time had come has
        a record."""
        self._now_s = now_s
        if isinstance(what, Request):
            if not what.program.timed_out:
                self._connect(what)
        elif not self._over:
            what()
        return self._taken()

    def ended(self, request: Request, how: Ending, now_s: float) -> list[Action]:
        """A request has ended: its record, and what may be sent because of it, unless the session is over."""
        self._now_s, program = now_s, request.program
        self._finish(request, how)
        self._free_connection(request.client)
        program.failed += how.reply.outcome is Outcome.FAILED
        if program.timed_out:
            self._give_up(program)
        elif not self._over:
            self._launch(program, program.execution.reply(request.number, how.reply), now_s)
            self._settle(program)
        return self._taken()

    def stop(self) -> None:
        self._over = True

    def cut_off(self) -> list[Action]:
        """Records of the programs that the end interrupted. Their requests have to be ended before."""
        assert self._over, "a session is cut off when it is over"
        assert not self.under_way, "its requests are ended first"
        self._actions += [Record(program.record(None, Outcome.CANCELLED)) for program in self._programs]
        self._programs.clear()
        return self._taken()

    def _taken(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    def _wait(self, until_s: float, what: Timer) -> None:
        self._actions.append(Wait(until_s, what))

    # ---- programs

    def _begin(self, client: Client, index: int, t_intended_s: float) -> None:
        program = ActiveProgram(
            client, index, self._programs_begun, t_intended_s, Execution(client.program(index))
        )
        self._programs_begun += 1
        self._programs[program] = None
        self._awaited += self._is_awaited(program)
        self._launch(program, program.execution.start(), t_intended_s)
        if self._plan.program_timeout_s is not None:
            self._wait(t_intended_s + self._plan.program_timeout_s, partial(self._time_out, program))
        self._settle(program)

    def _time_out(self, program: ActiveProgram) -> None:
        """Cancel what was sent, end what waits for a connection, and begin nothing more."""
        if program not in self._programs:
            return
        program.timed_out = True
        for request in list(program.requests):
            if request.t_start_s is None:
                if request in (queued := self._queued[request.client]):
                    queued.remove(request)
                program.failed += 1
                self._finish(request, Ending(Reply(outcome=Outcome.FAILED), error=TIMED_OUT))
            else:
                self._actions.append(Cancel(request))
        self._give_up(program)

    def _give_up(self, program: ActiveProgram) -> None:
        """A program that took too long is over when its last request has ended."""
        if not program.requests and program in self._programs:
            self._end_program(program, Outcome.FAILED)

    def _refill(self, client: Client) -> None:
        """The next program of a closed-loop client, unless it has had its last."""
        if self._has_more(client.name):
            index = self._begun[client.name]
            self._begun[client.name] = index + 1
            self.progress.programs_due += 1
            self._begin(client, index, self._now_s)
        self._end_arrivals()

    def _launch(self, program: ActiveProgram, ready: Sequence[Ready], t_step_s: float) -> None:
        """These calls may be sent, each after its own thinking time."""
        for number, call in ready:
            t_intended_s = t_step_s + call.after_s
            self._wait(t_intended_s, Request(program, number, call, t_intended_s))

    def _settle(self, program: ActiveProgram) -> None:
        outcome = program.execution.outcome
        if outcome is not None and program in self._programs:
            self._end_program(program, outcome)

    def _end_program(self, program: ActiveProgram, outcome: Outcome) -> None:
        """Record the program, and let a closed-loop client replace it."""
        del self._programs[program]
        self._actions.append(Record(program.record(self._now_s, outcome)))
        self.progress.programs_done += 1
        self._awaited -= self._is_awaited(program)
        if program.client.name in self._begun:
            delay_s = AFTER_FAILURE_S if program.failed else 0.0
            self._wait(self._now_s + delay_s, partial(self._refill, program.client))
        self._end_if_drained()

    # ---- requests and connections

    def _connect(self, request: Request) -> None:
        """The request takes one of its client's connections, or waits for one."""
        self.progress.in_flight += 1
        self.under_way[request] = request.program.requests[request] = None
        name = request.client
        if self._connections[name] < self._plan.connections_per_client:
            self._connections[name] += 1
            self._send(request)
        else:
            self._queued[name].append(request)

    def _send(self, request: Request) -> None:
        request.t_start_s = self._now_s
        self._actions.append(Send(request))

    def _finish(self, request: Request, how: Ending) -> None:
        del self.under_way[request], request.program.requests[request]
        progress, outcome = self.progress, how.reply.outcome
        progress.now_s = self._now_s
        progress.in_flight -= 1
        progress.ok += outcome is Outcome.OK
        progress.failed += outcome is Outcome.FAILED
        progress.cancelled += outcome is Outcome.CANCELLED
        progress.output_tokens += how.output_tokens
        self._actions.append(Record(_request_record(request, how, self._now_s)))

    def _free_connection(self, name: str) -> None:
        if self._over:
            return
        if self._queued[name]:
            self._wait(self._now_s, partial(self._send, self._queued[name].popleft()))
        else:
            self._connections[name] -= 1

    # ---- the end

    def _end_open_loop(self) -> None:
        self._open_loop = False
        self._end_arrivals()

    def _end_arrivals(self) -> None:
        """Begin to drain if no program will come any more."""
        if self._draining or self._open_loop or any(map(self._has_more, self._begun)):
            return
        self._draining = True
        if self._plan.drain_s is not None:
            self._wait(self._now_s + self._plan.drain_s, self.stop)
        self._end_if_drained()

    def _has_more(self, name: str) -> bool:
        most = self._plan.programs_per_client
        return self._now_s < self._plan.duration_s and (most is None or self._begun[name] < most)

    def _end_if_drained(self) -> None:
        if self._draining and not self._awaited:
            self._over = True

    def _is_awaited(self, program: ActiveProgram) -> bool:
        return self._plan.drain_for == "all" or program.client.well_behaved


def _arrivals(clients: Sequence[Client], plan: Plan) -> list[tuple[float, int, int]]:
    """Time, client's place and index of open-loop programs: in order of time, then of clients."""
    return sorted(
        (time_s, place, index)
        for place, client in enumerate(clients)
        if client.name not in plan.at_once
        for index, time_s in enumerate(
            client.arrival_times(until_s=plan.duration_s, most=plan.programs_per_client)
        )
    )


def _request_record(request: Request, how: Ending, now_s: float) -> RequestRecord:
    return RequestRecord(
        client=request.client,
        program=request.program.index,
        call=request.number,
        stage=request.call.stage,
        t_intended_s=round(request.t_intended_s, 6),
        t_start_s=None if request.t_start_s is None else round(request.t_start_s, 6),
        t_first_token_s=how.token_times[0][0] if how.token_times else None,
        t_done_s=round(now_s, 6),
        outcome=how.reply.outcome.value,
        max_output_tokens=request.call.max_output_tokens,
        **{name: getattr(how, name) for name in _OF_ENDING},
    )


_OF_ENDING = [one.name for one in fields(Ending)][1:]
"""Fields of a record that are those of its ending."""
