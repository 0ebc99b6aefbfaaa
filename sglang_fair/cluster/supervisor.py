"""Runs a `Plan`: starts its processes in order, restarts those that die, and stops all of them at the end.

Until the cluster is ready, a process that dies ends the attempt, because a wrong argument would be wrong again. After
that, the `RestartRule` says when a process that died is restarted, and processes can be added and removed. The
supervisor knows processes and nothing of SGLang.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from router.client import RouterClient
from router.events import WorkerDown
from sglang_fair.cluster.child import Child
from sglang_fair.cluster.console import ConsoleReporter
from sglang_fair.cluster.plan import STAGES, VITAL, Plan, Process
from sglang_fair.common import tls

POLL_S = 0.2
PROGRESS_S = 0.5
LOCAL_CHECK_S = 5.0


@dataclass(frozen=True)
class RestartRule:
    """A process that died is started again after a wait that doubles with each early death, which is one before it has
    been ready for `early_s`. One that the cluster cannot do without is given up after `give_up_after` of them in a row,
    and the cluster ends."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    early_s: float = 60.0
    give_up_after: int = 5

    def delay_s(self, early: int) -> float:
        return min(self.first_delay_s * 2.0 ** min(max(0, early - 1), 64), self.longest_delay_s)


class StartFailed(RuntimeError):
    """A process did not become ready; the text says which and why."""


class _GivenUp(Exception):
    """A process without which the cluster cannot go on."""


async def nothing() -> None:
    """What there is to know without a router."""


@dataclass
class Supervisor:
    """One run of a plan, which may change while it runs. `stop` ends it gracefully; a second `stop` kills."""

    plan: Plan
    reporter: ConsoleReporter
    rule: RestartRule = RestartRule()
    link: RouterClient | None = None
    """Reports replicas that die and return to the router."""
    known: Callable[[], Awaitable[Collection[str] | None]] = nothing
    """The names of the replicas that the router knows; None: it does not say."""
    inherited: Callable[[Process], Sequence[int]] = lambda spec: ()
    """Which of our open files a process gets."""
    was_up: bool = False
    """Whether all processes have been ready at some time."""
    _children: dict[str, Child] = field(default_factory=dict)
    _keepers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _is_ending: bool = False
    _changes: set[asyncio.Task[None]] = field(default_factory=set)
    _kept: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _hurry: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    def state(self, name: str) -> str:
        """The state of a process: up, or down (it is being started or restarted)."""
        child = self._children.get(name)
        return "up" if child is not None and child.running and child.ready_s is not None else "down"

    def respec(self, spec: Process) -> None:
        """Replaces the process of this name in the plan; it takes effect when that process is next started."""
        processes = tuple(spec if one.name == spec.name else one for one in self.plan.processes)
        self.plan = replace(self.plan, processes=processes)

    def stop(self) -> bool:
        """Ends the run gracefully, or at once when called again, which is returned. May be called from a signal handler
        of the loop."""
        if again := self._stop.is_set():
            self._hurry.set()
        self._stop.set()
        return again

    async def run(self) -> bool:
        """Runs until `stop`. True if it was stopped, False if it ended because a process was given up.

        Raises `StartFailed` when the cluster never became ready. No process is left when it returns.
        """
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_ending = True
            under_way = [serving, stopping, *self._changes]
            for task in under_way:
                task.cancel()
            await asyncio.wait(under_way)
            await self._stop_all()
        if not serving.cancelled():
            serving.result()
        return self._stop.is_set()

    async def _serve(self) -> None:
        """Starts everything and restarts what dies. Returns when the cluster cannot go on."""
        for roles in STAGES:
            await self._start_all(self.plan.of(*roles))
        self.was_up = True
        self.reporter.up(self.pids)
        try:
            async with self._kept:
                for child in self._children.values():
                    self._watch(child)
        except* _GivenUp:
            pass

    def _watch(self, child: Child) -> None:
        self._keepers[child.spec.name] = self._kept.create_task(self._keep(child))

    async def add(self, spec: Process) -> None:
        """Starts one more process; once it is ready, it is restarted when it dies. Raises `StartFailed`."""

        async def work() -> None:
            self.plan = replace(self.plan, processes=(*self.plan.processes, spec))
            try:
                child = await self._start(spec)
                await self._until_ready(child)
            except BaseException:
                await self._remove(spec.name)
                raise
            self._watch(child)
            self._report_up(spec)

        await self._change(work())

    async def let_go(self, name: str) -> None:
        """No longer restarts this process when it ends."""
        await self._change(self._let_go(name))

    async def remove(self, name: str) -> None:
        """Stops a process after `let_go`, and removes it from the plan."""
        await self._change(self._remove(name))

    async def _change(self, work: Coroutine[None, None, None]) -> None:
        """Carries out a change of the plan. Raises `StartFailed` outside of the time when the cluster is up."""
        if self._is_ending or not self.was_up:
            work.close()
            raise StartFailed(f"the cluster is {'being stopped' if self._is_ending else 'not up yet'}")
        task = asyncio.create_task(work)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await task

    async def _let_go(self, name: str) -> None:
        keeper = self._keepers.pop(name, None)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait([keeper])

    async def _remove(self, name: str) -> None:
        if name in self._children:
            await self._stop_one(self._children[name])
            del self._children[name]
        processes = tuple(one for one in self.plan.processes if one.name != name)
        self.plan = replace(self.plan, processes=processes)

    async def _stop_one(self, child: Child) -> None:
        if not await child.stop(self._hurry):
            self.reporter.say(f"{child.spec.name} was killed: it had not ended in time")

    async def _start_all(self, specs: Sequence[Process]) -> None:
        """Starts `specs` side by side and waits until all are ready. Raises `StartFailed`."""
        began_s = time.monotonic()
        for spec in specs:
            await self._start(spec)
        waits = {asyncio.create_task(self._until_ready(self._children[spec.name])): spec for spec in specs}
        pending = set(waits)
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED
                )
                for wait in done:
                    wait.result()
                if pending:
                    left = [waits[wait] for wait in waits if wait in pending]
                    limit_s = max(spec.ready_timeout_s for spec in left)
                    self.reporter.waiting([spec.name for spec in left], time.monotonic() - began_s, limit_s)
        finally:
            for wait in pending:
                wait.cancel()
            # Of several that failed at once, the first one is raised.
            await asyncio.gather(*waits, return_exceptions=True)

    async def _start(self, spec: Process) -> Child:
        try:
            child = await Child.start(spec, self.reporter.line, self.inherited(spec))
        except OSError as error:
            raise StartFailed(f"{spec.name} cannot be started: {error}") from error
        self._children[spec.name] = child
        return child

    async def _until_ready(self, child: Child) -> None:
        """Waits until `child` is ready. Raises `StartFailed` when it dies first, or takes too long."""
        name, limit_s = child.spec.name, child.spec.ready_timeout_s
        ready = asyncio.create_task(self._becomes_ready(child))
        exited = asyncio.create_task(child.exited())
        try:
            await asyncio.wait([ready, exited], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                self.reporter.died(name, exited.result(), child.tail)
                why = child.tail[-1] if child.spec.says_why and child.tail else exited.result()
                raise StartFailed(f"{name} ended before it was ready: {why}")
            if not ready.done():
                self.reporter.died(name, f"not ready after {limit_s:.0f} s", child.tail)
                raise StartFailed(f"{name} was not ready after {limit_s:.0f} s (--start-timeout)")
            ready.result()
        finally:
            ready.cancel()
            exited.cancel()
            await asyncio.wait([ready, exited])
        child.ready_s = time.monotonic()
        self.reporter.is_ready(name, child.ready_s - child.started_s)

    async def _becomes_ready(self, child: Child) -> None:
        spec = child.spec
        if spec.ready.startswith(("http://", "https://")):
            await answers_200(spec.ready, tls.believed(None, spec.certificate))
        else:
            await child.saw(spec.ready)
        while spec.lists and len(await self.known() or ()) < spec.lists:
            await asyncio.sleep(POLL_S)

    async def _keep(self, child: Child) -> None:
        """Restarts the process whenever it ends. Raises `_GivenUp`."""
        early = 0
        while True:
            how = await child.exited()
            spec = self._spec(child.spec.name)
            early = 0 if child.served_s >= self.rule.early_s else early + 1
            if child.ready_s is not None:
                self.reporter.died(spec.name, how, child.tail)
                self._report_down(spec)
            if early >= self.rule.give_up_after and spec.role in VITAL:
                within = f"within {self.rule.early_s:.0f} s of being ready"
                self.reporter.say(f"{spec.name} is given up: it died {early} times in a row {within}")
                raise _GivenUp
            delay_s = self.rule.delay_s(early)
            self.reporter.say(f"{spec.name} is started again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            try:
                child = await self._start(self._spec(spec.name))  # `respec` may have changed it
                await self._until_ready(child)
            except StartFailed as error:
                self.reporter.say(str(error))
                await child.stop(self._hurry)
                child.ready_s = None
                continue
            self._report_up(spec)

    def _spec(self, name: str) -> Process:
        return next(spec for spec in self.plan.processes if spec.name == name)

    def _report_down(self, spec: Process) -> None:
        if self.link is not None and spec.worker is not None:
            self.link.tell(WorkerDown(spec.worker.worker))

    def _report_up(self, spec: Process) -> None:
        if self.link is None:
            return
        if spec.worker is not None:
            self.link.tell(spec.worker)
        if spec.role == "router":  # a new router takes all workers on its command line to be up
            for replica in self.plan.of("replica"):
                child = self._children.get(replica.name)  # a replica that is being added has none yet
                if child is None or child.ready_s is None or not child.running:
                    self._report_down(replica)

    async def _stop_all(self) -> None:
        for roles in reversed(STAGES):
            names = [spec.name for spec in self.plan.of(*roles) if spec.name in self._children]
            await asyncio.gather(*(self._stop_one(self._children[name]) for name in names))


async def answers_200(url: str, shown: ssl.SSLContext | None = None) -> None:
    """Returns once GET `url` answers 200. `shown` is what an https:// address must show; None: what the system
    believes."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=LOCAL_CHECK_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            try:
                async with session.get(url, ssl=shown or True) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                pass
            await asyncio.sleep(POLL_S)
