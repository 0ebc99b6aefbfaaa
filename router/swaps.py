"""Which model each worker has, and how it gets another one: the router's side of a swap, all of it. Pure.

A worker with an agent (`sglang_fair.agent`) is in one of four states:

    unknown   nothing has said what it has: after a start of the router or of the worker. It gets nothing
    serves    it has `loaded`, and gets requests for that
    empties   it is to load `target`. It gets nothing more; what it has finishes, or is cut after `finish_s`, if another
              worker can go on with it
    loads     nothing of the old model is left. The agent has order `number`; it gets nothing

    unknown --told--> serves --ask, wanted--> empties --its last request ends--> loads --told--> serves

The workers' table and the placement follow each change (`_align`). What an agent says is the truth, whatever is
believed here: a worker that was restarted has its first model again, an agent that was restarted says what it found.
Orders are numbered; an agent says the last that it has ended, so an order that is lost is given again, and none is
carried out for a router that has gone on. A router that was restarted counts on from what agents say.

A swap that fails leaves the old model. For `RETRY_S`, twice as long after each failure in a row, up to
`LONGEST_RETRY_S`, the placement is told that the worker cannot load it; an operator may have it tried at any time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import msgspec

from router.events import Action, Agent, Cut, Exchange
from router.flights import Flights, State
from router.placement.contract import Equipment
from router.workers import Worker
from sglang_fair.settings.table import FINISH_S

RETRY_S, LONGEST_RETRY_S = 2.0, 300.0
ASK_S = 0.05
"""Between two questions about a worker that is at work: each looks at its queue."""
MOST_ERROR = 300
"""Characters of an agent's error that are kept."""


class Phase(Enum):
    """Where a worker stands."""

    UNKNOWN = "unknown"
    SERVES = "serves"
    EMPTIES = "empties"
    LOADS = "loads"


@dataclass(slots=True)
class _Swap:
    """A worker that has, or had, an agent."""

    phase: Phase = Phase.UNKNOWN
    loaded: str = ""
    """What it serves, or did until it began to load; "": not known."""
    target: str = ""
    number: int = 0
    """Of the last order."""
    since_s: float = 0.0
    """When the phase began."""
    peer: bytes | None = None
    """Its agent; None: that is gone."""
    swap_s: dict[str, float] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    """By model, how often in a row it could not be loaded."""
    not_before_s: dict[str, float] = field(default_factory=dict)
    swaps: int = 0
    failed: int = 0
    swap_seconds: float = 0.0
    error: str = ""
    """Of the last swap; "": it succeeded."""
    told: dict[str, float] = field(default_factory=dict)
    """What the placement was told that it can load."""
    asked_s: float = -inf
    """When the placement was last asked what it wants there."""

    @property
    def served(self) -> str:
        """The model for which it has requests, new or running; "": none."""
        return self.loaded if self.phase in (Phase.SERVES, Phase.EMPTIES) else ""

    @property
    def can_load(self) -> dict[str, float]:
        """The models that it can load, each with about how many seconds that takes. Empty without an agent."""
        return self.swap_s if self.peer is not None else {}

    def enter(self, phase: Phase, now_s: float) -> None:
        if self.phase is not phase:
            self.phase, self.since_s = phase, now_s


class Swaps:
    """The swaps of one router. All times are seconds of one clock that never goes back."""

    def __init__(self, state: State, flights: Flights, finish_s: float = FINISH_S) -> None:
        """ValueError if `finish_s` is negative."""
        if not finish_s >= 0:
            raise ValueError(f"finish_s is {finish_s}: it cannot be negative")
        self._finish_s = finish_s
        self._workers, self._placement, self._tree = state.workers, state.placement, state.tree
        self._flights = flights
        self._swaps: dict[str, _Swap] = {}
        self._busy: list[Worker] = []
        self._quiet_until_s = -inf
        """Until then nothing is asked while these, which are all that may be asked about, are at work."""
        self._retry_s = inf
        """When a worker may be told again to load what has failed."""

    # -- what happens

    def told(self, said: Agent, now_s: float, peer: bytes) -> Exchange:
        """An agent has said what its worker has; the answer to it. Of a worker that is not up nothing is kept, and what
        it cannot load it does not have."""
        worker = self._workers.get(said.worker)
        if worker is None:
            complaint = f"there is no worker {said.worker[:100]!r}"
            return Exchange(said.id, said.worker, complaint=complaint)
        complaint, loaded = "", said.loaded
        if loaded and loaded not in (said.swap_s or worker.up.models):
            complaint = f"{loaded[:100]!r} is none of the models that worker {said.worker} can load"
            loaded = ""
        swap = self._swaps.setdefault(said.worker, _Swap(since_s=now_s))
        swap.peer, swap.swap_s = peer, dict(said.swap_s)
        if swap.phase is Phase.LOADS and said.number >= swap.number and not said.busy:
            self._ended(swap, loaded, said.error, now_s)
        elif said.busy:
            swap.enter(Phase.LOADS, now_s)
            swap.target = said.target or swap.target
        elif swap.phase is not Phase.LOADS and loaded != swap.served:
            swap.loaded = loaded
            swap.enter(Phase.SERVES if loaded else Phase.UNKNOWN, now_s)
        swap.number = max(swap.number, said.number, said.busy)
        self._align(said.worker, now_s)
        ahead = tuple(self._placement.next_models(said.worker))
        order = self._order(said.worker, swap)
        return msgspec.structs.replace(order, id=said.id, ahead=ahead, complaint=complaint)

    def ask(self, name: str, model: str, now_s: float) -> str | None:
        """An operator wants `model` at a worker. Why that cannot be, or None: it has it, or will."""
        swap = self._swaps.get(name)
        if self._workers.get(name) is None:
            return f"there is no worker {name[:100]!r}"
        if swap is None or swap.peer is None:
            return f"no agent answers for worker {name[:100]!r}: it keeps the model that it has"
        if model not in swap.swap_s:
            known = ", ".join(swap.swap_s)
            return f"worker {name} cannot load {model[:100]!r}; it can load {known}"
        if swap.phase is Phase.UNKNOWN:
            return f"it is not known what worker {name} has loaded"
        if swap.phase is Phase.LOADS:
            return None if swap.target == model else f"worker {name} is loading {swap.target}"
        if model == swap.loaded:
            swap.enter(Phase.SERVES, now_s)
        else:
            swap.target = model
            swap.enter(Phase.EMPTIES, now_s)  # if it empties already, what runs has had some of its time
        self._align(name, now_s)
        return None

    def gone(self, name: str, now_s: float) -> None:
        """A worker is gone, or another process has taken its place."""
        swap = self._swaps.get(name)
        if swap is None:
            return
        swap.loaded, swap.told, swap.asked_s = "", {}, -inf
        swap.enter(Phase.UNKNOWN, now_s)
        if swap.peer is None:
            del self._swaps[name]

    def up(self, name: str, now_s: float) -> None:
        """A worker is up: what is known of its model holds."""
        self._align(name, now_s)

    def peer_gone(self, peer: bytes, now_s: float) -> None:
        """An agent, or another peer, is gone: a swap that has not been ordered will not be."""
        names = [name for name, swap in self._swaps.items() if swap.peer == peer]
        for name in names:
            swap = self._swaps[name]
            swap.peer = None
            if swap.phase is Phase.EMPTIES:
                swap.enter(Phase.SERVES, now_s)
            elif swap.phase is Phase.UNKNOWN:
                del self._swaps[name]
            self._align(name, now_s)
        if names:
            self._workers.look_again()

    def after(self, now_s: float) -> list[Action]:
        """What is to be sent after something has happened. Costs next to nothing where there are no agents."""
        if not self._swaps:
            return []
        if now_s >= self._retry_s:
            self._retry_s = inf
            for name in self._swaps:
                self._align(name, now_s)
        if self._placement.loads:
            self._ask_placement(now_s)
        actions: list[Action] = []
        for name, swap in self._swaps.items():
            worker = self._workers.get(name) if swap.phase is Phase.EMPTIES else None
            if worker is None:
                continue
            if worker.in_flight:
                if now_s - swap.since_s >= self._finish_s:
                    actions += self._cuts(worker)
                continue
            swap.number += 1
            swap.enter(Phase.LOADS, now_s)
            self._align(name, now_s)
            if swap.peer is not None:
                actions.append((swap.peer, self._order(name, swap)))
        return actions

    # -- what follows

    @property
    def is_empty(self) -> bool:
        """Whether no worker has an agent."""
        return not self._swaps

    def equip(self, worker: Worker, now_s: float) -> None:
        """Tells the placement what a worker has."""
        if not self._placement.loads:
            return
        has, swap = worker.up, self._swaps.get(worker.name)
        model = None if worker.pool is self._workers.nobody else worker.pool.model
        can = {} if swap is None else swap.told
        equipment = Equipment(model, can, has.kv_tokens or None, has.chunk_tokens or None)
        self._placement.equip(worker.name, equipment, now_s)

    def may_come(self, model: str, exclude: Iterable[str]) -> bool:
        """Whether a worker, other than `exclude`, may be made to load `model`."""
        if not self._placement.loads:
            return False
        for name, swap in self._swaps.items():
            worker = self._workers.get(name)
            if worker is None or model not in swap.can_load or worker.draining or name in exclude:
                continue
            if not (worker.sick and swap.phase is Phase.SERVES):
                return True
        return False

    def state(self, now_s: float) -> dict[str, dict[str, object]]:
        """By worker, as plain values, for people and dashboards."""
        return {
            name: {
                "phase": one.phase.value,
                "model": one.loaded,
                "target": one.target if one.phase in (Phase.EMPTIES, Phase.LOADS) else "",
                "for_s": round(now_s - one.since_s, 1),
                "agent": one.peer is not None,
                "swap_s": {model: round(seconds, 3) for model, seconds in one.swap_s.items()},
                "swaps": one.swaps,
                "failed": one.failed,
                "seconds": round(one.swap_seconds, 3),
                "error": one.error,
                "retry_in_s": {
                    model: round(until_s - now_s, 1)
                    for model, until_s in one.not_before_s.items()
                    if until_s > now_s
                },
            }
            for name, one in sorted(self._swaps.items())
        }

    # -- inside

    def _ended(self, swap: _Swap, loaded: str, error: str, now_s: float) -> None:
        """The order is over, one way or the other."""
        swap.swap_seconds += now_s - swap.since_s
        if error:
            failures = swap.failures[swap.target] = swap.failures.get(swap.target, 0) + 1
            wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(failures - 1, 30))
            swap.not_before_s[swap.target] = now_s + wait_s
            swap.failed += 1
            swap.error = f"{swap.target}: {error}"[:MOST_ERROR]
        else:
            swap.failures.pop(swap.target, None)
            swap.not_before_s.pop(swap.target, None)
            swap.swaps += 1
            swap.error = ""
        swap.loaded = loaded
        swap.enter(Phase.SERVES if loaded else Phase.UNKNOWN, now_s)

    def _ask_placement(self, now_s: float) -> None:
        """Which models it wants at workers that serve and can load several; of one that is at work not more often than
        every `ASK_S`."""
        if now_s < self._quiet_until_s and all(worker.in_flight for worker in self._busy):
            return
        asked = [
            (worker, swap)
            for name, swap in self._swaps.items()
            if swap.phase is Phase.SERVES and len(swap.can_load) > 1 and (worker := self._workers.get(name))
        ]
        self._busy, self._quiet_until_s = [worker for worker, _ in asked], inf
        for worker, swap in asked:
            next_s = swap.asked_s + ASK_S
            if worker.in_flight and now_s < next_s:
                self._quiet_until_s = min(self._quiet_until_s, next_s)
                continue
            swap.asked_s = now_s
            self._quiet_until_s = min(self._quiet_until_s, now_s + ASK_S)
            wanted = self._placement.wanted(worker.name)
            if wanted != swap.loaded and wanted in swap.told:
                swap.target = wanted
                swap.enter(Phase.EMPTIES, now_s)
                self._align(worker.name, now_s)

    def _align(self, name: str, now_s: float) -> None:
        """Makes table and placement say of a worker what is known of its model."""
        worker, swap = self._workers.get(name), self._swaps.get(name)
        if worker is None or swap is None:
            return
        self._quiet_until_s = -inf
        models = tuple(swap.can_load) or worker.up.models
        self._workers.set_models(worker, models, is_swapping=swap.phase is not Phase.SERVES)
        later = {model: at_s for model, at_s in swap.not_before_s.items() if at_s > now_s}
        self._retry_s = min(self._retry_s, *later.values(), inf)
        can = {one: took_s for one, took_s in swap.can_load.items() if one == swap.loaded or one not in later}
        is_new, swap.told = swap.told != can, can
        # One that has not said its models was taken to have the only one; it has none if its agent serves none.
        has_none = not swap.served and bool(models) and worker.pool is not self._workers.nobody
        if is_other := worker.up.loaded != swap.served or has_none:
            self._rehome(worker, swap.served, now_s)
        if is_new or is_other:
            self.equip(worker, now_s)

    def _rehome(self, worker: Worker, model: str, now_s: float) -> None:
        """Has a worker serve `model`, "" none, with an empty cache. What it was taken to have in flight it has not; if
        it has, its gateway says so again."""
        self._flights.fail_all(worker, now_s)
        self._tree.clear(worker.name)
        if not self._placement.loads:
            self._workers.placement_of(worker).worker_down(worker.name)
        self._workers.set_loaded(worker, model)
        if not self._placement.loads:
            self._workers.placement_of(worker).worker_up(worker.name, worker.capacity)

    def _order(self, name: str, swap: _Swap) -> Exchange:
        """What the worker's agent has to do."""
        if swap.phase is not Phase.LOADS:
            return Exchange("", name)
        return Exchange("", name, swap.number, swap.target)

    def _cuts(self, worker: Worker) -> list[Action]:
        """What another worker could go on with, once."""
        actions: list[Action] = []
        for flight in self._flights.by_id.values():
            may_go_on = worker.pool.taking or self.may_come(flight.request.model, ())
            if flight.worker is worker and not flight.is_cut and may_go_on:
                flight.is_cut = True
                actions.append((flight.peer, Cut(flight.request.id)))
        return actions
