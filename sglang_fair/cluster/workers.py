"""Replicas that are added and removed while the cluster runs: `sglang-fair workers list`, `add`, `drain` and `swap`.

    add      starts a replica with the cluster's own settings and waits until it is ready. From then on it is restarted
             like the first ones, and the router and the gateways know it
    swap     has a replica load another model, and waits until it serves that
    drain    the router sends it nothing new, it finishes what it has, and then it is stopped for good

Where replicas run, and how they are started and stopped there, a `Crew` knows.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import aiohttp

from router.client import RouterClient, RouterGone
from router.events import Query, Refuse, Snapshot, Swap
from sglang_fair.cluster.control import Refused, Say
from sglang_fair.cluster.scale import ScaleUp
from sglang_fair.cluster.status import model_of
from sglang_fair.common.curve import Keys
from sglang_fair.common.service_keys import replica_key

POLL_S = 0.2
LOOK_S = 1.0
KNOWN_S = 5.0
"""Longest wait until the router knows a new replica."""

CHECK_TIMEOUT_S = 5.0
IDLE_CHECKS_S = 30.0
"""How long a replica that the router no longer lists is asked whether it has finished. While there was no router,
gateways may have sent it requests on their own."""

PHASES = {
    "unknown": "it is not known what it has",
    "empties": "what runs there finishes",
    "loads": "it loads",
}


Add = Callable[[Say, str | None], Awaitable[Any]]
"""As `Workers.add`."""


@dataclass(frozen=True)
class ReplicaState:
    """One replica as `sglang-fair workers list` shows it."""

    name: str
    url: str
    pid: int | None
    state: str
    """starting, up, draining, down (being restarted) or waits (for room on a node)."""
    model: str = ""
    node: str = ""


class Crew(Protocol):
    """The replicas of a cluster, where they run."""

    def rows(self) -> list[ReplicaState]:
        """In the order of their numbers."""
        ...

    async def start(self, number: int, model: str | None, say: Say) -> None:
        """One more, of the model of this name or of the one that the fewest have; returns when it is ready. Raises
        `Refused`."""
        ...

    async def let_go(self, name: str) -> None:
        """It takes no new requests, and is not restarted when it ends."""
        ...

    def remind(self, name: str, known: Mapping[str, Any]) -> None:
        """The router still lists one that was let go, in this state."""
        ...

    async def stop(self, name: str) -> None:
        """Stops one that was let go, for good."""
        ...


@dataclass
class Workers:
    """Carries out these requests on a crew. Several may run at a time."""

    crew: Crew
    router: str
    """The router's address, which has its own of `keys`."""
    keys: Keys | None = None
    _states: dict[str, str] = field(default_factory=dict)
    """The states of the replicas that are being added or drained."""

    async def handle(self, request: dict[str, Any], say: Say) -> dict[str, Any]:
        match request:
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
        return [replace(row, state=self._states.get(row.name, row.state)) for row in self.crew.rows()]

    async def seen(self) -> list[ReplicaState]:
        """The same with the models that those have which can load several, if a router answers."""
        swaps = await router_state(self.router, "swaps", keys=self.keys) or {}
        return [
            replace(row, model=model_of(swaps[row.name])) if row.name in swaps else row for row in self.rows()
        ]

    async def swap(self, name: str, model: str, say: Say) -> dict[str, Any]:
        """Has a replica load another model, and returns when it serves. Raises `Refused`."""
        began = await router_answer(self.router, Swap("swap", name, model), KNOWN_S, self.keys)
        if isinstance(began, Refuse):
            raise Refused(began.reason)
        if began is None:
            raise Refused("no router answers")
        said = ""
        while True:
            state = (await router_state(self.router, "swaps", keys=self.keys) or {}).get(name, {})
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
            await router_state(self.router, "workers", keys=self.keys) or {}
        )  # gateways may have added some
        taken = {number(name) for name in (*known, *self._states, *(row.name for row in self.crew.rows()))}
        chosen = next(one for one in range(len(taken) + 1) if one not in taken)
        name = f"r{chosen}"
        self._states[name] = "starting"
        say(f"{name} is being started")
        try:
            await self.crew.start(chosen, model, say)
        finally:
            del self._states[name]
        if not await self._is_known(name):
            say("no router answers; it hears of the replica as soon as it is back")
        return next(row for row in self.rows() if row.name == name)

    async def drain(self, name: str, say: Say) -> ReplicaState:
        """Lets a replica finish, and stops it. Raises `Refused`."""
        rows = {row.name: row for row in self.rows()}
        if name not in rows:
            raise Refused(f"there is no replica {name[:100]!r}")
        if name in self._states:
            raise Refused(f"{name} is {self._states[name]}")
        if not any(row.state == "up" for other, row in rows.items() if other != name):
            raise Refused(f"no other replica is up: nothing could be served without {name}")
        self._states[name] = "draining"
        try:
            await self.crew.let_go(name)
            await self._drained(name, rows[name].url, say)
            await self.crew.stop(name)
        finally:
            del self._states[name]
        return replace(rows[name], state="stopped")

    async def _drained(self, name: str, url: str, say: Say) -> None:
        """Returns when the router no longer lists the worker and it has no request left, or when it has died."""
        said = None
        while True:
            known = await router_state(self.router, "workers", keys=self.keys)
            if known is not None and name not in known:
                break
            if known is None:
                waits = "no router answers"
            else:
                self.crew.remind(name, known[name])
                waits = f"{known[name].get('in_flight', '?')} requests under way"
            if waits != said:
                said = waits
                say(f"{name} is draining: {waits}")
            await asyncio.sleep(POLL_S)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + IDLE_CHECKS_S
        while url and loop.time() < until_s and await is_at_work(url):
            await asyncio.sleep(POLL_S)

    async def _is_known(self, name: str) -> bool:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + KNOWN_S
        while loop.time() < until_s:
            if name in (await router_state(self.router, "workers", keys=self.keys) or {}):
                return True
            await asyncio.sleep(POLL_S)
        return False


async def scale_up(
    rule: ScaleUp, queues: Callable[[], Awaitable[dict[str, Any] | None]], add: Add, say: Say
) -> None:
    """Starts replicas while the router's `queues` are short of them, as `rule` has it, until it is cancelled."""
    clock = asyncio.get_running_loop().time
    while True:
        found = (await queues() or {}).get("shortage")
        shortage = found if isinstance(found, dict) else {}
        model = rule.look(shortage, clock())
        if model is not None:
            which = f" of {model}" if model else ""
            more = shortage.get("more") or f"at least {shortage.get('least')}"
            say(
                f"scale-up {rule.added + 1} of {rule.most}: one more replica{which} is started, because deadlines "
                f"cannot be met ({more} more would do: {shortage.get('why', '')})"
            )
            try:
                row = await add(say, model or None)
            except Refused as error:
                rule.failed(clock())
                say(f"scale-up: none could be started; tried again in {rule.retry_s:.0f} s: {error}")
            else:
                rule.started(clock())
                say(f"scale-up: {row.name} serves; {rule.most - rule.added} more may be started")
        await asyncio.sleep(LOOK_S)


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


async def router_answer(
    endpoint: str, question: Query | Swap, timeout_s: float = 1.0, keys: Keys | None = None
) -> Snapshot | Refuse | None:
    """What the router at `endpoint` answers, None if it does not in time. With `keys` it must have its own."""
    async with RouterClient(endpoint, keys, beats=False) as client:
        try:
            answer: Snapshot | Refuse = await client.ask(question, (Snapshot, Refuse), timeout_s)
        except RouterGone:
            return None
        return answer


async def router_state(
    endpoint: str, part: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """A part of the router's snapshot: its workers by name, how far they are with loading another model (swaps), its
    queues. Empty if it has no such part, None if it does not answer in time."""
    answer = await router_answer(endpoint, Query(""), timeout_s, keys)
    if not isinstance(answer, Snapshot):
        return None
    found = answer.state.get(part)
    return found if isinstance(found, dict) else {}


def number(name: str) -> int:
    """That of a replica of ours; -1 for any other name."""
    digits = name.removeprefix("r")
    return int(digits) if digits.isdecimal() else -1
