"""Runs clients' programs against a live endpoint and records what happened.

Arrivals are open-loop: programs begin at their times by the wall clock whatever the server does, and a
request's latency counts from the moment it could have been sent (its program's arrival, or its parent's
answer), so a driver or server that falls behind cannot hide it. A client of the closed loop keeps a fixed
number of programs under way instead; the next begins when one of them has ended. Answers are streamed; every
request ends as one record. Connections are bounded per client, so no client can take another's.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp
import msgspec

from sglang_fair.common.identity import HEADER_APP, HEADER_CLIENT, HEADER_INTERACTION, HEADER_STAGE
from workloads import wire
from workloads.clients import Client
from workloads.programs import Call, Execution, Outcome, Ready, Reply
from workloads.records import End, ProgramRecord, Records, RequestRecord, Sample

HEADER_WORKER = "x-fair-worker"
"""In an answer: which replica served it."""

AFTER_FAILURE_S = 1.0
"""How long a client of the closed loop waits before it puts another program in the place of one that failed:
a server that refuses at once is not flooded."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Under which names a request says who sent it; an empty name leaves that header out."""

    client: str = HEADER_CLIENT
    app: str = HEADER_APP
    interaction: str = HEADER_INTERACTION
    stage: str = HEADER_STAGE


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and in which form: an SGLang replica, our gateway, or any OpenAI server."""

    url: str
    kind: str = wire.GENERATE
    model: str = "default"
    headers: Headers = field(default_factory=Headers)
    ignore_eos: bool = True
    """Every answer has its full length, so that all schedulers do the same work."""
    temperature: float = 0.0
    timeout_s: float = 600.0
    """Of one request, from connection to last token."""
    api_key: str | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """By client; `api_key` is for the others."""
    user_field: bool = False
    """Whether the body names the client too, as OpenAI's `user`."""

    def __post_init__(self) -> None:
        if self.kind not in wire.PATHS:
            raise ValueError(f"unknown kind of endpoint {self.kind!r}; there are {', '.join(wire.PATHS)}")

    def header(self, client: str, app: str, interaction: str, stage: str, *, tag: str = "") -> dict[str, str]:
        """The HTTP headers of one request; `tag` follows the client's name."""
        named = {
            self.headers.client: client + tag,
            self.headers.app: app,
            self.headers.interaction: interaction,
            self.headers.stage: stage,
        }
        key = self.api_keys.get(client, self.api_key)
        if key is not None:
            named["authorization"] = f"Bearer {key}"
        return {name: value for name, value in named.items() if name and value}


@dataclass(frozen=True, slots=True)
class Plan:
    """How long a run lasts and how it ends."""

    duration_s: float
    """Programs arrive until then."""
    programs_per_client: int | None = None
    at_once: Mapping[str, int] = field(default_factory=dict)
    """Clients of the closed loop: how many programs each keeps under way. The others follow their arrivals."""
    drain_s: float | None = 0.0
    """How long to wait for `drain_for` after the last arrival; the rest is cancelled. None: for ever."""
    drain_for: Literal["all", "well-behaved"] = "all"
    connections_per_client: int = 256
    sample_s: float = 0.5
    """How often the replicas are asked for their `/fair`."""
    token_step_s: float = 0.0
    """Of an answer's tokens the first and the last are recorded when they come, those between not more often
    than this, so that long runs fit into memory."""

    def __post_init__(self) -> None:
        if self.duration_s <= 0 or self.connections_per_client < 1 or self.sample_s <= 0:
            raise ValueError(f"durations and connections must be positive: {self}")
        if any(places < 1 for places in self.at_once.values()):
            raise ValueError(f"a closed loop needs at least 1 program under way: {dict(self.at_once)}")


@dataclass(slots=True)
class Progress:
    """Where a run stands; handed to the `watch` function whenever something ended."""

    now_s: float = 0.0
    programs_due: int = 0
    programs_done: int = 0
    in_flight: int = 0
    ok: int = 0
    failed: int = 0
    cancelled: int = 0
    output_tokens: int = 0

    def ended(self, outcome: str, output_tokens: int) -> None:
        """A request has ended so."""
        self.in_flight -= 1
        self.ok += outcome == Outcome.OK
        self.failed += outcome == Outcome.FAILED
        self.cancelled += outcome == Outcome.CANCELLED
        self.output_tokens += output_tokens


METERS = ("service", "extend_tokens", "output_tokens", "waiting", "running", "backlog")
"""What a sample has of each client."""


@dataclass(slots=True, eq=False)
class Active:
    """One program under way."""

    client: Client
    index: int
    t_intended_s: float
    execution: Execution
    failed: int = 0

    def record(self, t_done_s: float | None, outcome: Outcome) -> ProgramRecord:
        """What is kept of it; `t_done_s` None: the run ended first."""
        return ProgramRecord(
            client=self.client.name,
            program=self.index,
            t_intended_s=round(self.t_intended_s, 6),
            t_done_s=None if t_done_s is None else round(t_done_s, 6),
            requests=self.execution.calls,
            failed=self.failed,
            outcome=outcome.value,
        )


def arrivals(clients: Sequence[Client], plan: Plan) -> list[tuple[float, Client, int]]:
    """When the programs of the open loop arrive: time, client, number of the program, in order."""
    due = sorted(
        (time_s, order, index)
        for order, client in enumerate(clients)
        if client.name not in plan.at_once
        for index, time_s in enumerate(
            client.arrival_times(until_s=plan.duration_s, most=plan.programs_per_client)
        )
    )
    return [(time_s, clients[order], index) for time_s, order, index in due]


class Driver:
    """One run: `await Driver(...).run()` once. All rows go to `records`, errors included."""

    def __init__(
        self,
        endpoint: Endpoint,
        clients: Sequence[Client],
        plan: Plan,
        records: Records,
        *,
        replicas: Mapping[str, str] | None = None,
        tag: str = "",
        watch: Callable[[Progress], None] | None = None,
    ) -> None:
        """`replicas` maps names to base URLs whose `/fair` is sampled.

        `tag` is appended to clients' names on the wire: servers keep a client's deficits, and a run that
        should not inherit them names its clients anew. Records carry the plain names.
        """
        names = [client.name for client in clients]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"a run needs clients with names of their own, not {names}")
        if not plan.at_once.keys() <= set(names):
            raise ValueError(
                f"no such clients for the closed loop: {sorted(plan.at_once.keys() - set(names))}"
            )
        self._endpoint = endpoint
        self._clients = clients
        self._plan = plan
        self._records = records
        self._replicas = dict(replicas or {})
        self._tag = tag
        self._watch = watch
        self.progress = Progress()
        self._slots = {name: asyncio.Semaphore(plan.connections_per_client) for name in names}
        self._active: dict[Active, None] = {}
        """In the order in which they began."""
        self._begun = dict.fromkeys(plan.at_once, 0)
        """Programs of the closed loop's clients so far."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._settled = asyncio.Event()
        """Set whenever a program began or ended: time to look whether the run may go on."""
        self._stopping = False
        self._lost_samples = 0
        self._start_s = 0.0
        self._halted = asyncio.Event()
        """Set when the run is to end early."""
        self._broken: BaseException | None = None
        """What a program or the driver got wrong, which ends the run; `_halted` is set with it."""

    async def run(self) -> None:
        """Drive all programs to the plan's end. Raises what a program or this driver itself got wrong."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=self._endpoint.timeout_s, sock_connect=10)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=2**20, auto_decompress=False
        ) as session:
            self._start_s = time.monotonic()
            sampler = asyncio.create_task(self._sample(session)) if self._replicas else None
            try:
                await self._arrivals(session)
                await self._drain()
            finally:
                self._stopping = True
                await asyncio.sleep(0)  # a task that is cancelled before its first step would leave no record
                if sampler is not None:
                    sampler.cancel()
                await self._cancel([*self._tasks, *([sampler] if sampler is not None else [])])
        if self._broken is not None:
            raise self._broken
        for active in list(self._active):
            self._record_program(active, None, Outcome.CANCELLED)
        self._records.add(End(round(self._now(), 6), self._lost_samples))

    def stop(self) -> None:
        """End the run early: what is under way is cancelled, and the records are whole."""
        self._halted.set()
        self._settled.set()

    def _now(self) -> float:
        return time.monotonic() - self._start_s

    # ---- when programs begin and the run ends

    async def _arrivals(self, session: aiohttp.ClientSession) -> None:
        """Begin programs until the plan's end of arrivals."""
        for client in self._clients:
            for _ in range(self._plan.at_once.get(client.name, 0)):
                self._take_place(session, client)
        await self._open_loop(session)
        while not self._halted.is_set() and self._places_open():
            await self._settles(self._plan.duration_s)
        if self._plan.programs_per_client is None:
            await self._until(self._plan.duration_s)

    async def _open_loop(self, session: aiohttp.ClientSession) -> None:
        due = arrivals(self._clients, self._plan)
        self.progress.programs_due += len(due)
        for time_s, client, index in due:
            await self._until(time_s)
            if self._halted.is_set():
                return
            self._begin(session, client, index, time_s)

    def _take_place(self, session: aiohttp.ClientSession, client: Client) -> None:
        """The next program of a client of the closed loop, unless it has had its last."""
        index = self._begun[client.name]
        if self._more(client.name):
            self._begun[client.name] = index + 1
            self.progress.programs_due += 1
            self._begin(session, client, index, self._now())

    async def _replace(self, session: aiohttp.ClientSession, ended: Active) -> None:
        """Another program in the place of one that has ended."""
        await asyncio.sleep(AFTER_FAILURE_S if ended.failed else 0)
        self._take_place(session, ended.client)

    def _more(self, name: str) -> bool:
        most = self._plan.programs_per_client
        in_time = self._now() < self._plan.duration_s and not self._halted.is_set()
        return in_time and (most is None or self._begun[name] < most)

    def _places_open(self) -> bool:
        return any(self._more(name) for name in self._plan.at_once)

    async def _until(self, time_s: float) -> None:
        """Wait for that time, or for the run's early end."""
        delay_s = time_s - self._now()
        if delay_s > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._halted.wait(), delay_s)

    async def _settles(self, until_s: float | None) -> None:
        """Wait until a program begins or ends, at most until that time."""
        self._settled.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if until_s is None else max(0.0, until_s - self._now())):
                await self._settled.wait()

    async def _drain(self) -> None:
        until_s = None if self._plan.drain_s is None else self._now() + self._plan.drain_s
        while not self._halted.is_set() and self._awaited() and (until_s is None or self._now() < until_s):
            await self._settles(until_s)

    def _awaited(self) -> bool:
        everyone = self._plan.drain_for == "all"
        return any(everyone or active.client.well_behaved for active in self._active)

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and self._broken is None:
                self._broken = result

    # ---- programs

    def _begin(self, session: aiohttp.ClientSession, client: Client, index: int, t_intended_s: float) -> None:
        active = Active(client, index, t_intended_s, Execution(client.program(index)))
        self._active[active] = None
        self._launch(session, active, active.execution.start(), t_intended_s)
        self._settled.set()
        self._settle(session, active)

    def _launch(
        self, session: aiohttp.ClientSession, active: Active, ready: Sequence[Ready], t_step_s: float
    ) -> None:
        for number, call in ready:
            self._spawn(self._call(session, active, number, call, t_step_s + call.after_s))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._broken is None:
            self._broken = task.exception()
            self.stop()

    async def _call(
        self, session: aiohttp.ClientSession, active: Active, number: int, call: Call, t_intended_s: float
    ) -> None:
        """One request at its time and, once it has ended, the launch of what waited for it."""
        await self._until(t_intended_s)
        if self._halted.is_set():
            return
        self.progress.in_flight += 1
        reply, record = await self._request(session, active, number, call, t_intended_s)
        self.progress.now_s = self._now()
        self.progress.ended(record.outcome, record.output_tokens)
        self._records.add(record)
        active.failed += record.outcome == Outcome.FAILED
        if self._stopping:
            return
        self._launch(session, active, active.execution.reply(number, reply), record.t_done_s)
        self._settle(session, active)
        if self._watch is not None:
            self._watch(self.progress)

    def _settle(self, session: aiohttp.ClientSession, active: Active) -> None:
        """Record the program if it has ended."""
        if active.execution.outcome is not None and active in self._active:
            self._record_program(active, self._now(), active.execution.outcome)
            self.progress.programs_done += 1
            self._settled.set()
            if active.client.name in self._plan.at_once:
                self._spawn(self._replace(session, active))

    def _record_program(self, active: Active, t_done_s: float | None, outcome: Outcome) -> None:
        del self._active[active]
        self._records.add(active.record(t_done_s, outcome))

    # ---- requests

    async def _request(
        self, session: aiohttp.ClientSession, active: Active, number: int, call: Call, t_intended_s: float
    ) -> tuple[Reply, RequestRecord]:
        """Send one call and read its answer; whatever happens, there is a record of it."""
        endpoint = self._endpoint
        body = wire.body(
            endpoint.kind,
            call,
            model=endpoint.model,
            ignore_eos=endpoint.ignore_eos,
            temperature=endpoint.temperature,
            user=active.client.name + self._tag if endpoint.user_field else None,
        )
        exchange = _Exchange(wire.Answer(endpoint.kind, prompt_tokens=wire.known_tokens(call.prompt)))
        try:
            async with self._slots[active.client.name]:
                exchange.t_start_s = self._now()
                await self._exchange(session, active, call.stage, body, exchange)
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            exchange.outcome, exchange.error = Outcome.CANCELLED, "the run ended"
        except TimeoutError:
            exchange.error = f"no answer within {self._endpoint.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            exchange.error = f"{type(error).__name__}: {error}"
        answer = exchange.answer
        if exchange.error is None:
            exchange.outcome = Outcome.OK
        record = RequestRecord(
            client=active.client.name,
            program=active.index,
            call=number,
            stage=call.stage,
            t_intended_s=round(t_intended_s, 6),
            t_start_s=None if exchange.t_start_s is None else round(exchange.t_start_s, 6),
            t_first_token_s=exchange.token_times[0][0] if exchange.token_times else None,
            t_done_s=round(self._now(), 6),
            outcome=exchange.outcome.value,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            max_output_tokens=call.max_output_tokens,
            token_times=exchange.token_times,
            worker=exchange.worker,
            status=exchange.status,
            error=exchange.error,
        )
        tokens = tuple(answer.tokens)
        packed = wire.pack(tokens) if isinstance(call.prompt, bytes) else b""
        return Reply(answer.text, tokens, exchange.outcome, packed), record

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        active: Active,
        stage: str,
        body: Mapping[str, Any],
        exchange: "_Exchange",
    ) -> None:
        endpoint, client = self._endpoint, active.client
        interaction = f"{client.name}{self._tag}-{active.index}"
        headers = endpoint.header(client.name, client.app, interaction, stage, tag=self._tag)
        url = endpoint.url.rstrip("/") + wire.PATHS[endpoint.kind]
        async with session.post(url, json=body, headers=headers) as response:
            exchange.status = response.status
            exchange.worker = response.headers.get(HEADER_WORKER)
            if response.status != 200:
                exchange.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data:"):
                    exchange.take(line[5:].strip(), self._now(), self._plan.token_step_s)
        exchange.close()

    # ---- what the replicas say

    async def _sample(self, session: aiohttp.ClientSession) -> None:
        """Ask all replicas at once, at even times, until cancelled. An answer that is missing is counted."""
        count = 0
        while True:
            asked = (self._ask(session, count, name, url) for name, url in self._replicas.items())
            await asyncio.gather(*asked)
            count += 1
            await self._until(count * self._plan.sample_s)

    async def _ask(self, session: aiohttp.ClientSession, count: int, name: str, url: str) -> None:
        try:
            async with session.get(
                f"{url.rstrip('/')}/fair", timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                response.raise_for_status()
                state = msgspec.json.decode(await response.read())
            # The state is as of some instant of the exchange; its end is the latest that it can be.
            known = self._known(state["clients"])
            self._records.add(Sample(count, round(self._now(), 6), name, known, state.get("bound")))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError, TypeError):
            self._lost_samples += 1

    def _known(self, clients: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
        found = {}
        for client in self._clients:
            account = clients.get(client.name + self._tag)
            if account is not None:
                found[client.name] = {meter: account[meter] for meter in METERS if meter in account}
        return found


@dataclass(slots=True)
class _Exchange:
    """One request as far as it has come."""

    answer: wire.Answer
    t_start_s: float | None = None
    token_times: list[tuple[float, int]] = field(default_factory=list)
    outcome: Outcome = Outcome.FAILED
    worker: str | None = None
    status: int | None = None
    error: str | None = None
    done: bool = False

    def take(self, data: bytes, now_s: float, step_s: float = 0.0) -> None:
        """One event of the stream. Tokens that came within `step_s` of what was recorded before are recorded
        with the next."""
        if data == b"[DONE]":
            self.done = True
            return
        before = self.answer.output_tokens
        self.answer.feed(msgspec.json.decode(data))
        if self.answer.output_tokens > before:
            times = self.token_times
            if len(times) > 1 and times[-1][0] - times[-2][0] < step_s:
                times.pop()
            times.append((round(now_s, 6), self.answer.output_tokens))

    def close(self) -> None:
        """The stream has ended: with an answer, or with an error that says what is missing."""
        if self.answer.error is not None:
            self.error = self.answer.error
        elif not self.answer.finished:
            self.error = "the stream ended before the answer did"
