"""Which model each worker has, and how it gets another one: the router's side of a swap. Pure.

A worker with an agent (`sglang_fair.agent`) is in one of four states:

    unknown   nobody has said what it has: after a start of the router or of the worker. It gets nothing
    serves    it has `loaded`, and gets requests for that
    empties   it is to load `target`. It gets nothing more; what it has finishes, or is cut after `finish_s`
    loads     nothing of the old model is left. The agent has order `number`; it gets nothing

    unknown --told--> serves --ask, want--> empties --emptied--> loads --told--> serves (the new model, or the old one)

What an agent says is the truth, whatever is believed here: a worker that was restarted has its first model again, an
agent that was restarted says what it found. Orders are numbered; an agent says the last that it has ended, so an order
that is lost is given again, and none is carried out for a router that has gone on. A router that was restarted counts
on from what agents say.

A swap that fails leaves the old model. The placement may have it tried again after `RETRY_S`, twice as long after each
failure in a row, up to `LONGEST_RETRY_S`; an operator at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.events import Agent, Exchange
from sglang_fair.settings.table import FINISH_S

RETRY_S, LONGEST_RETRY_S = 2.0, 300.0

MOST_ERROR = 300
"""Characters of an agent's error that are kept."""


class Phase(Enum):
    """Where a worker stands."""

    UNKNOWN = "unknown"
    SERVES = "serves"
    EMPTIES = "empties"
    LOADS = "loads"


@dataclass(slots=True)
class _Worker:
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


class Swaps:
    """The workers that have an agent. All times are seconds of one clock that never goes back."""

    def __init__(self, finish_s: float = FINISH_S) -> None:
        """ValueError if `finish_s` is negative."""
        if not finish_s >= 0:
            raise ValueError(f"finish_s is {finish_s}: it cannot be negative")
        self._finish_s = finish_s
        self._workers: dict[str, _Worker] = {}

    # -- what happens

    def told(self, said: Agent, now_s: float, peer: bytes = b"") -> None:
        """An agent says what its worker has."""
        worker = self._workers.setdefault(said.worker, _Worker(since_s=now_s))
        worker.peer = peer
        worker.swap_s = dict(said.swap_s)
        if worker.phase is Phase.LOADS and said.number >= worker.number and not said.busy:
            self._ended(worker, said, now_s)
        elif said.busy:
            self._enter(worker, Phase.LOADS, now_s)
            worker.target = said.target or worker.target
        elif worker.phase is not Phase.LOADS and said.loaded != self._served(worker):
            worker.loaded = said.loaded
            self._enter(worker, Phase.SERVES if said.loaded else Phase.UNKNOWN, now_s)
        worker.number = max(worker.number, said.number, said.busy)

    def ask(self, name: str, model: str, now_s: float) -> str | None:
        """An operator wants `model` there. Why that cannot be, or None: it has it, or will."""
        worker = self._workers.get(name)
        if worker is None or worker.peer is None:
            return f"no agent answers for worker {name[:100]!r}: it keeps the model that it has"
        if model not in worker.swap_s:
            known = ", ".join(worker.swap_s)
            return f"worker {name} cannot load {model[:100]!r}; it can load {known}"
        if worker.phase is Phase.UNKNOWN:
            return f"it is not known what worker {name} has loaded"
        if worker.phase is Phase.LOADS:
            return None if worker.target == model else f"worker {name} is loading {worker.target}"
        if model == worker.loaded:
            self._enter(worker, Phase.SERVES, now_s)
        else:
            self._begin(worker, model, now_s)
        return None

    def want(self, name: str, model: str, now_s: float) -> bool:
        """The placement wants `model` there. Whether the worker begins to swap."""
        worker = self._workers.get(name)
        if worker is None or worker.phase is not Phase.SERVES or worker.peer is None:
            return False
        if model == worker.loaded or model not in worker.swap_s:
            return False
        if now_s < worker.not_before_s.get(model, now_s):
            return False
        self._begin(worker, model, now_s)
        return True

    def emptied(self, name: str, now_s: float) -> bool:
        """The worker has no request left. Whether its agent has a new order."""
        worker = self._workers.get(name)
        if worker is None or worker.phase is not Phase.EMPTIES:
            return False
        worker.number += 1
        self._enter(worker, Phase.LOADS, now_s)
        return True

    def gone(self, name: str, now_s: float) -> None:
        """The worker is gone, or another process has taken its place."""
        worker = self._workers.get(name)
        if worker is None:
            return
        worker.loaded = ""
        self._enter(worker, Phase.UNKNOWN, now_s)
        if worker.peer is None:
            del self._workers[name]

    def peer_gone(self, peer: bytes, now_s: float) -> None:
        """An agent is gone: a swap that has not been ordered will not be."""
        for name, worker in list(self._workers.items()):
            if worker.peer == peer:
                worker.peer = None
                if worker.phase is Phase.EMPTIES:
                    self._enter(worker, Phase.SERVES, now_s)
                elif worker.phase is Phase.UNKNOWN:
                    del self._workers[name]

    # -- what follows

    @property
    def is_empty(self) -> bool:
        """Whether no worker has an agent."""
        return not self._workers

    def knows(self, name: str) -> bool:
        """Whether the worker has, or had, an agent."""
        return name in self._workers

    def served(self, name: str) -> str:
        """The model for which the worker has requests, new or running; "": none."""
        return self._served(self._workers[name])

    def takes(self, name: str) -> bool:
        """Whether the worker may be sent requests. One without an agent always may."""
        worker = self._workers.get(name)
        return worker is None or worker.phase is Phase.SERVES

    def serving(self) -> list[str]:
        """The workers that may be told to load another model."""
        return [
            name
            for name, one in self._workers.items()
            if one.phase is Phase.SERVES and one.peer is not None and len(one.swap_s) > 1
        ]

    def emptying(self) -> list[str]:
        """The workers of which something is awaited before they can load."""
        return [name for name, one in self._workers.items() if one.phase is Phase.EMPTIES]

    def is_impatient(self, name: str, now_s: float) -> bool:
        """Whether what still runs at a worker that empties has had its time."""
        worker = self._workers[name]
        return worker.phase is Phase.EMPTIES and now_s - worker.since_s >= self._finish_s

    def can_load(self, name: str) -> Mapping[str, float]:
        """The models that the worker can load, each with about how many seconds that takes. Empty without an agent."""
        worker = self._workers.get(name)
        return {} if worker is None or worker.peer is None else worker.swap_s

    def order(self, name: str, question: str = "", ahead: Sequence[str] = ()) -> Exchange:
        """What the worker's agent has to do. `ahead` are the models that come after, soonest first."""
        worker = self._workers[name]
        if worker.phase is not Phase.LOADS:
            return Exchange(question, name, ahead=tuple(ahead))
        return Exchange(question, name, worker.number, worker.target, tuple(ahead))

    def peer(self, name: str) -> bytes | None:
        """The worker's agent; None if there is none."""
        worker = self._workers.get(name)
        return None if worker is None else worker.peer

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
            for name, one in sorted(self._workers.items())
        }

    # -- inside

    def _served(self, worker: _Worker) -> str:
        return worker.loaded if worker.phase in (Phase.SERVES, Phase.EMPTIES) else ""

    def _begin(self, worker: _Worker, model: str, now_s: float) -> None:
        worker.target = model
        if worker.phase is not Phase.EMPTIES:  # what runs has had some of its time
            self._enter(worker, Phase.EMPTIES, now_s)

    def _ended(self, worker: _Worker, said: Agent, now_s: float) -> None:
        """The order is over, one way or the other."""
        worker.swap_seconds += now_s - worker.since_s
        if said.error:
            failures = worker.failures.get(worker.target, 0) + 1
            worker.failures[worker.target] = failures
            wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** min(failures - 1, 30))
            worker.not_before_s[worker.target] = now_s + wait_s
            worker.failed += 1
            worker.error = f"{worker.target}: {said.error}"[:MOST_ERROR]
        else:
            worker.failures.pop(worker.target, None)
            worker.not_before_s.pop(worker.target, None)
            worker.swaps += 1
            worker.error = ""
        worker.loaded = said.loaded
        self._enter(worker, Phase.SERVES if said.loaded else Phase.UNKNOWN, now_s)

    @staticmethod
    def _enter(worker: _Worker, phase: Phase, now_s: float) -> None:
        if worker.phase is not phase:
            worker.phase, worker.since_s = phase, now_s
