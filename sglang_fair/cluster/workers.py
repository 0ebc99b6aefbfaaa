"""Replicas that are added and removed while the cluster runs: `sglang-fair workers list`, `add`, `drain` and `swap`.

    add      starts a process with the cluster's own settings and waits until it is ready. From then on it is restarted
             like the first ones, and the router and the gateways know it
    swap     has a replica load another model, and waits until it serves that
    drain    the router sends it nothing new, it finishes what it has, and then it is stopped for good

A router that is restarted gets the replicas of that moment.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from router.events import Refuse, Swap
from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.gpus import GpusTaken
from sglang_fair.cluster.link import Link, router_asked, router_swaps, router_workers
from sglang_fair.cluster.options import ConfigError
from sglang_fair.cluster.plan import Process, Worker, agent_name, with_workers
from sglang_fair.cluster.ports import PortTaken
from sglang_fair.cluster.status import model_of
from sglang_fair.cluster.supervisor import StartFailed, Supervisor
from sglang_fair.common.curve import Keys
from sglang_fair.common.service_keys import replica_key

POLL_S = 0.2
KNOWN_S = 5.0
"""Longest wait until the router knows a new replica."""

CHECK_TIMEOUT_S = 5.0
IDLE_CHECKS_S = 30.0
"""How long a replica that the router no longer lists is asked whether it has finished. While there was no router,
gateways may have sent it requests on their own."""

Planner = Callable[[int, str | None, Sequence[str]], Process]
"""The replica with this number, as the cluster would have started it; what else it takes and raises is that of
`AddedReplicas.plan`."""

Freed = Callable[[Process], None]

AgentOf = Callable[[Process], Process | None]
"""The agent for a replica; None: it keeps its model."""

PHASES = {
    "unknown": "it is not known what it has",
    "empties": "what runs there finishes",
    "loads": "it loads",
}


@dataclass(frozen=True)
class ReplicaState:
    """One replica as `sglang-fair workers list` shows it."""

    name: str
    url: str
    pid: int | None
    state: str
    """starting, up, draining, down (being restarted) or given up."""
    model: str = ""


class Workers:
    """Carries out these requests on one supervisor. Several may run at a time."""

    def __init__(
        self,
        supervisor: Supervisor,
        link: Link,
        router: str,
        plan: Planner,
        freed: Freed,
        agent_of: AgentOf = lambda spec: None,
        keys: Keys | None = None,
    ) -> None:
        """`router` is the router's address, which has its own of `keys`; `freed` is called for a replica that is gone
        for good."""
        self._agent_of = agent_of
        self._supervisor = supervisor
        self._link = link
        self._router = router
        self._keys = keys
        self._plan = plan
        self._freed = freed
        self._states: dict[str, str] = {}
        """The states of the replicas that are being added or drained."""

    async def handle(self, asked: dict[str, Any], say: Say) -> dict[str, Any]:
        """One request of `control`. Raises `Refused`."""
        match asked:
            case {"do": "list"}:
                return {"workers": [vars(row) for row in await self.seen()]}
            case {"do": "swap", "name": str(name), "model": str(model)}:
                return await self.swap(name, model, say)
            case {"do": "add", "model": str(model)}:
                return vars(await self.add(say, model))
            case {"do": "add"}:
                return vars(await self.add(say))
            case {"do": "drain", "name": str(name)}:
                return vars(await self.drain(name, say))
        raise Refused("not a request: list, add or drain a name")

    def rows(self) -> list[ReplicaState]:
        """The replicas in the order of their numbers."""
        return [self._row(spec) for spec in sorted(self._specs(), key=lambda spec: number(spec.name))]

    async def seen(self) -> list[ReplicaState]:
        """The same with the models that those have which can load several, if a router answers."""
        swaps = await router_swaps(self._router, keys=self._keys) or {}
        return [
            replace(row, model=model_of(swaps[row.name])) if row.name in swaps else row for row in self.rows()
        ]

    async def swap(self, name: str, model: str, say: Say) -> dict[str, Any]:
        """Has a replica load another model, and returns when it serves. Raises `Refused`."""
        began = await router_asked(self._router, Swap("swap", name, model), KNOWN_S, self._keys)
        if isinstance(began, Refuse):
            raise Refused(began.reason)
        if began is None:
            raise Refused("no router answers")
        said = ""
        while True:
            state = (await router_swaps(self._router, keys=self._keys) or {}).get(name, {})
            phase = state.get("phase", "unknown")
            if phase == "serves":
                break
            if phase != said:
                said = phase
                say(f"{name}: {PHASES[phase]}")
            await asyncio.sleep(POLL_S)
        if state["model"] != model:
            raise Refused(f"{name} still has {state['model']}: {state['error'] or 'it was called off'}")
        return {"name": name, "model": model}

    async def add(self, say: Say, model: str | None = None) -> ReplicaState:
        """Starts one more replica, of the model of this name if one is given, and returns when it serves. Raises
        `Refused`."""
        known = (
            await router_workers(self._router, keys=self._keys) or {}
        )  # some may have been added by the gateway
        taken = {*known, *self._states, *(spec.name for spec in self._specs())}
        try:
            has = [one.worker.model for one in self._specs() if one.worker is not None]
            spec = self._plan(free_number({number(name) for name in taken}), model, has)
        except (ConfigError, PortTaken, GpusTaken) as error:
            raise Refused(str(error)) from None
        say(f"{spec.name} is being started")
        self._states[spec.name] = "starting"
        try:
            await self._supervisor.add(spec)
        except StartFailed as error:
            self._freed(spec)
            raise Refused(str(error)) from None
        finally:
            del self._states[spec.name]
        self._respec_router()
        agent = self._agent_of(spec)
        if agent is not None:
            try:
                await self._supervisor.add(agent)
            except StartFailed as error:
                raise Refused(f"{spec.name} is up, and nobody says what it has: {error}") from None
        if not await self._is_known(spec.name):
            say("no router answers; it hears of the replica as soon as it is back")
        return self._row(spec)

    async def drain(self, name: str, say: Say) -> ReplicaState:
        """Lets a replica finish, and stops it. Raises `Refused`."""
        spec = next((spec for spec in self._specs() if spec.name == name), None)
        if spec is None or spec.worker is None:
            raise Refused(f"there is no replica {name[:100]!r}")
        if name in self._states:
            raise Refused(f"{name} is {self._states[name]}")
        others = [one.name for one in self._specs() if one.name != name and one.name not in self._states]
        if all(self._supervisor.state(other) != "up" for other in others):
            raise Refused(f"no other replica is up: nothing could be served without {name}")
        row = replace(self._row(spec), state="stopped")
        self._states[name] = "draining"
        try:
            self._respec_router()
            await self._supervisor.let_go(name)
            await self._drained(spec.worker, say)
            await self._supervisor.remove(name)
            for agent in self._supervisor.plan.of("agent"):
                if agent.name == agent_name(name):
                    await self._supervisor.let_go(agent.name)
                    await self._supervisor.remove(agent.name)
        except StartFailed as error:
            raise Refused(str(error)) from None
        finally:
            del self._states[name]
        self._freed(spec)
        return row

    async def _drained(self, worker: Worker, say: Say) -> None:
        """Returns when the router no longer lists the worker and it has no request left, or when it has died."""
        said = None
        while True:
            known = await router_workers(self._router, keys=self._keys)
            if known is not None and worker.name not in known:
                break
            if known is not None and self._supervisor.state(worker.name) != "up":
                self._link.down(worker)  # the supervisor no longer watches it, so nobody else reports this
            elif known is not None and known[worker.name].get("state") != "draining":
                self._link.drain(worker)
            waits = "no router answers" if known is None else has_left(known[worker.name])
            if waits != said:
                said = waits
                say(f"{worker.name} is draining: {waits}")
            await asyncio.sleep(POLL_S)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + IDLE_CHECKS_S
        while loop.time() < until_s and await is_at_work(worker.url):
            await asyncio.sleep(POLL_S)

    async def _is_known(self, name: str) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + KNOWN_S
        while loop.time() < until_s:
            if name in (await router_workers(self._router, keys=self._keys) or {}):
                return True
            await asyncio.sleep(POLL_S)
        return False

    def _specs(self) -> tuple[Process, ...]:
        return self._supervisor.plan.of("replica")

    def _respec_router(self) -> None:
        """Makes sure that a restarted router starts with the replicas that take requests."""
        workers = [spec.worker for spec in self._specs() if spec.worker and spec.name not in self._states]
        for router in self._supervisor.plan.of("router"):
            self._supervisor.respec(with_workers(router, workers))

    def _row(self, spec: Process) -> ReplicaState:
        state = self._states.get(spec.name) or self._supervisor.state(spec.name)
        url = spec.worker.url if spec.worker else ""
        model = spec.worker.model if spec.worker else ""
        return ReplicaState(spec.name, url, self._supervisor.pids.get(spec.name), state, model)


def has_left(state: dict[str, Any]) -> str:
    """What a worker that is draining waits for, as the router has it."""
    return f"{state.get('in_flight', '?')} requests under way"


async def is_at_work(url: str) -> bool:
    """Whether a replica reports waiting or running requests. False when it does not answer."""
    timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
    try:
        session = aiohttp.ClientSession(timeout=timeout, headers=replica_key.headers())
        async with session, session.get(f"{url}/fair") as response:
            totals = (await response.json()).get("totals", {})
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError, AttributeError):
        return False
    return bool(totals.get("running", 0) + totals.get("waiting", 0))


def number(name: str) -> int:
    """That of a replica of ours; -1 for any other name."""
    digits = name.removeprefix("r")
    return int(digits) if digits.isdecimal() else -1


def free_number(taken: set[int]) -> int:
    """The first that nobody has."""
    return next(one for one in range(len(taken) + 1) if one not in taken)
