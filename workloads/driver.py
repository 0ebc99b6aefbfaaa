"""Runs clients' programs against a live endpoint and records what happened.

`workloads.session` decides what is sent when; the driver is its clock and its sockets. It waits for the session's
timers by the wall clock, streams each answer, and reports how each request ended. Beside the load it samples what the
replicas say about their clients (`/fair`).
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, assert_never

import aiohttp
import msgspec

from sglang_fair.common.identity import (
    HEADER_APP,
    HEADER_CLIENT,
    HEADER_INTERACTION,
    HEADER_LAST,
    HEADER_STAGE,
)
from workloads import wire
from workloads.clients import Client
from workloads.programs import Call, Outcome, Reply
from workloads.records import METERS, End, Records, Sample
from workloads.session import (
    RUN_ENDED,
    TIMED_OUT,
    Action,
    Cancel,
    Ending,
    Plan,
    Record,
    Request,
    Send,
    Session,
    SessionProgress,
    Timer,
    Wait,
)

HEADER_WORKER = "x-fair-worker"
"""In an answer: which replica served it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go and in which form: an SGLang replica, our gateway, or any OpenAI server."""

    url: str
    kind: str = wire.GENERATE
    model: str = "default"
    named_in: str = HEADER_CLIENT
    """The header with the client's name, the default beside those of application, interaction and stage; "": none."""
    ignore_eos: bool = True
    """Ask for answers of full length, so that all schedulers do the same work."""
    temperature: float = 0.0
    timeout_s: float = 600.0
    """For one request, from connection to last token."""
    api_key: str | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)
    """By client. Clients that are not listed send `api_key`."""
    user_field: bool = False
    """The body names the client too, as OpenAI's `user`."""

    def __post_init__(self) -> None:
        if self.kind not in wire.PATHS:
            raise ValueError(f"unknown kind of endpoint {self.kind!r}; there are {', '.join(wire.PATHS)}")

    def header(
        self, client: str, app: str, interaction: str, stage: str, *, last: bool = False, tag: str = ""
    ) -> dict[str, str]:
        """The HTTP headers of one request; `tag` follows the client's name."""
        named = {self.named_in: client + tag}
        if self.named_in == HEADER_CLIENT:
            named |= {HEADER_APP: app, HEADER_INTERACTION: interaction, HEADER_STAGE: stage}
            named |= {HEADER_LAST: "1" if last else ""}
        key = self.api_keys.get(client, self.api_key)
        if key is not None:
            named["authorization"] = f"Bearer {key}"
        return {name: value for name, value in named.items() if name and value}


class Driver:
    """One run: `await Driver(...).run()` once. Every request and program, failed ones included, goes to `records`."""

    def __init__(
        self,
        endpoint: Endpoint,
        clients: Sequence[Client],
        plan: Plan,
        records: Records,
        *,
        replicas: Mapping[str, str] | None = None,
        tag: str = "",
        watch: Callable[[SessionProgress], None] | None = None,
    ) -> None:
        """`replicas` maps names to the base URLs whose `/fair` is sampled. `watch` is called after each request.

        `tag` is appended to the clients' names on the wire. Servers keep a client's deficits, so a run that must not
        inherit them gives its clients new names. Records have the plain names.
        """
        self._endpoint = endpoint
        self._clients = clients
        self._plan = plan
        self._records = records
        self._replicas = dict(replicas or {})
        self._tag = tag
        self._watch = watch
        self._session = Session(clients, plan)
        self._http: aiohttp.ClientSession
        self._start_s = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        """A heap by (time, number); the number counts up as timers are set."""
        self._timers_set = 0
        self._exchanges: dict[Request, _Exchange] = {}
        """Requests that have been sent and have not ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        """Set whenever there may be something else to wait for: a new timer, or the end."""
        self._lost_samples = 0
        self._broken: BaseException | None = None
        """An error of a program or of this driver; it ends the run."""

    async def run(self) -> None:
        """Drive all programs to the plan's end. Raises whatever a program or this driver itself got wrong."""
        timeout = aiohttp.ClientTimeout(total=self._endpoint.timeout_s, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)  # the session bounds each client's connections
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=2**20, auto_decompress=False
        ) as self._http:
            self._start_s = time.monotonic()
            sampler = asyncio.create_task(self._sample()) if self._replicas else None
            try:
                self._carry_out(self._session.start())
                await self._until_over()
            finally:
                self._session.stop()
                await self._cancel([*self._tasks, *([sampler] if sampler is not None else [])])
                self._end_requests()
        if self._broken is not None:
            raise self._broken
        self._carry_out(self._session.cut_off())
        self._records.add(End(round(self._now(), 6), self._lost_samples))

    def stop(self) -> None:
        """End the run early: what is under way is cancelled, and the records are complete."""
        self._session.stop()
        self._wake.set()

    def _now(self) -> float:
        return time.monotonic() - self._start_s

    # ---- the session

    async def _until_over(self) -> None:
        while True:
            self._run_timers()
            if self._session.over:
                return
            self._wake.clear()
            next_s = self._timers[0][0] - self._now() if self._timers else None
            with suppress(TimeoutError):
                async with asyncio.timeout(next_s):
                    await self._wake.wait()

    def _run_timers(self) -> None:
        """Hand in every timer that has run out, and those that this sets."""
        while self._timers and not self._session.over and self._timers[0][0] <= (now_s := self._now()):
            _, _, what = heappop(self._timers)
            self._carry_out(self._session.due(what, now_s))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Wait(until_s, what):
                    self._timers_set += 1
                    heappush(self._timers, (until_s, self._timers_set, what))
                case Send(request):
                    self._exchanges[request] = _Exchange(self._endpoint.kind, request.call)
                    self._spawn(self._request(request))
                case Cancel(request):
                    if request in self._exchanges:
                        self._exchanges[request].give_up()
                case Record(row):
                    self._records.add(row)
                case _:
                    assert_never(action)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self._broken is None:
            self._broken = task.exception()
            self.stop()

    async def _cancel(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception) and self._broken is None:
                self._broken = result

    def _end_requests(self) -> None:
        """The run has ended: record what is under way as cancelled, requests whose time has just come included."""
        now_s = self._now()
        while self._timers and self._timers[0][0] <= now_s:
            _, _, what = heappop(self._timers)
            if isinstance(what, Request):
                self._session.due(what, now_s)
        for request in list(self._session.under_way):
            exchange = self._exchanges.pop(request, None) or _Exchange(self._endpoint.kind, request.call)
            exchange.how.error = RUN_ENDED
            self._carry_out(self._session.ended(request, exchange.ended(Outcome.CANCELLED), now_s))

    # ---- requests

    async def _request(self, request: Request) -> None:
        """Send one call and read its answer; whatever happens, the session hears how it ended."""
        endpoint, exchange = self._endpoint, self._exchanges[request]
        how = exchange.how
        body = wire.body(
            endpoint.kind,
            request.call,
            model=endpoint.model,
            ignore_eos=endpoint.ignore_eos,
            temperature=endpoint.temperature,
            user=request.client + self._tag if endpoint.user_field else None,
        )
        try:
            async with asyncio.timeout(None) as exchange.limit:
                if not exchange.is_given_up:
                    await self._exchange(request, body, exchange)
        except TimeoutError:
            how.error = f"no answer within {endpoint.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            how.error = f"{type(error).__name__}: {error}"
        if exchange.is_given_up and (how.error is not None or not exchange.done):
            how.error = TIMED_OUT
        del self._exchanges[request]
        exchange.ended(Outcome.OK if how.error is None else Outcome.FAILED)
        self._carry_out(self._session.ended(request, how, self._now()))
        self._run_timers()
        self._wake.set()
        if self._watch is not None:
            self._watch(self._session.progress)

    async def _exchange(self, request: Request, body: Mapping[str, Any], exchange: "_Exchange") -> None:
        endpoint, program = self._endpoint, request.program
        headers = endpoint.header(
            request.client,
            program.client.app,
            f"{request.client}{self._tag}-{program.index}",
            request.call.stage,
            last=request.call.last,
            tag=self._tag,
        )
        url = endpoint.url.rstrip("/") + wire.PATHS[endpoint.kind]
        async with self._http.post(url, json=body, headers=headers) as response:
            exchange.how.status = response.status
            exchange.how.worker = response.headers.get(HEADER_WORKER)
            if response.status != 200:
                exchange.how.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            if endpoint.kind in wire.WHOLE:
                exchange.take(await response.read(), self._now())
            async for line in response.content:
                if line.startswith(b"data:"):
                    exchange.take(line[5:].strip(), self._now(), self._plan.token_step_s)
        exchange.close()

    # ---- what the replicas say

    async def _sample(self) -> None:
        """Ask all replicas for their accounts at once, at even times, until cancelled. Missing answers are counted."""
        count = 0
        while True:
            await asyncio.gather(*(self._ask(count, name, url) for name, url in self._replicas.items()))
            count += 1
            await asyncio.sleep(count * self._plan.sample_s - self._now())

    async def _ask(self, count: int, name: str, url: str) -> None:
        try:
            async with self._http.get(
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
        accounts = {}
        for client in self._clients:
            account = clients.get(client.name + self._tag)
            if account is not None:
                accounts[client.name] = {meter: account[meter] for meter in METERS if meter in account}
        return accounts


class _Exchange:
    """One request and its answer, as far as it has come; at last how it ended."""

    def __init__(self, kind: str, call: Call) -> None:
        self._call = call
        self._answer = wire.Answer(kind, prompt_tokens=wire.known_tokens(call.prompt))
        self._times: list[tuple[float, int]] = []
        self.how = Ending(Reply(outcome=Outcome.FAILED), token_times=self._times)
        self.done = self.is_given_up = False
        self.limit: asyncio.Timeout | None = None
        """What interrupts it; None: it has not begun."""

    def give_up(self) -> None:
        self.is_given_up = True
        if self.limit is not None:
            self.limit.reschedule(asyncio.get_running_loop().time())

    def take(self, data: bytes, now_s: float, step_s: float = 0.0) -> None:
        """One event of the stream. Of tokens less than `step_s` apart only the last are recorded."""
        if data == b"[DONE]":
            self.done = True
            return
        before, times = self._answer.output_tokens, self._times
        self._answer.feed(msgspec.json.decode(data))
        if self._answer.output_tokens > before:
            if len(times) > 1 and times[-1][0] - times[-2][0] < step_s:
                times.pop()
            times.append((round(now_s, 6), self._answer.output_tokens))

    def close(self) -> None:
        """The stream has ended: with an answer, or with an error that says what is missing."""
        self.how.error = self._answer.error
        if not self._answer.finished and self.how.error is None:
            self.how.error = "the stream ended before the answer did"

    def ended(self, outcome: Outcome) -> Ending:
        answer, tokens = self._answer, tuple(self._answer.tokens)
        packed = wire.pack(tokens) if isinstance(self._call.prompt, bytes) else b""
        self.how.reply = Reply(answer.text, tokens, outcome, packed)
        self.how.prompt_tokens, self.how.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        self.how.output_tokens = answer.output_tokens
        return self.how
