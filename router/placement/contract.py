"""What a placement sees, what it decides, and what it is told.

A placement answers one question: which worker for this request? It keeps no count of requests in flight and
no belief about caches: loads come with `workers`, cached prefixes with `match`, both owned by the router's
core. What it keeps beyond that (credits, pointers, costs) is its own, and bounded in the number of clients
and requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

from router.events import Outcome
from router.radix import Match


@dataclass(frozen=True, slots=True)
class Request:
    """One request that needs a worker. `tokens` is its prompt, `input_tokens` their number."""

    id: str
    client: str
    tokens: bytes
    input_tokens: int
    max_output_tokens: int = 0
    namespace: str = ""
    exclude: tuple[str, ...] = ()
    """Workers that are not to have it. For a placement that holds it; else they are left out of `workers`."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was placed and is over, however it ended."""

    request: Request
    worker: str
    matched_tokens: int
    output_tokens: int
    outcome: Outcome
    ttft_s: float | None = None
    tpot_s: float | None = None


class WorkerView(Protocol):
    """A worker that is up, as a placement may look at it. Loads are of what was sent there and is not done."""

    @property
    def name(self) -> str:
        """Its name, unique among workers."""
        ...

    @property
    def capacity(self) -> float:
        """Its speed beside that of a worker of capacity 1."""
        ...

    @property
    def load(self) -> float:
        """Requests, divided by its capacity: s_w of D2LPM."""
        ...

    @property
    def prefill_tokens(self) -> float:
        """Prompt tokens that it was not believed to cache, of requests that have no output yet."""
        ...

    @property
    def decode_tokens(self) -> float:
        """Output tokens still to come, as far as their clients' past answers and their own limits tell."""
        ...

    @property
    def dispatched(self) -> int:
        """Requests sent to it so far."""
        ...

    @property
    def dispatched_tokens(self) -> int:
        """Prompt tokens sent to it so far, for ties: whoever had less comes first."""
        ...


class Placement(Protocol):
    """Chooses workers. Deterministic: the same calls give the same choices. Every order it uses is total.

    The core promises: `worker_up` before a worker appears in `workers`, `worker_down` after `done` of all
    that was placed there; `workers` is never empty, in the order of names, and leaves out whom the request
    excludes; each `place` that names a worker is followed by `placed` of the same request, and each `placed` by
    exactly one `done`; `placed` without `place` is a request that came to its worker without this router, and may be at
    any worker that is up; `now_s` never falls.
    """

    uses_caches: ClassVar[bool]
    """Whether a choice can depend on what workers have cached. Where not, nobody need tell the router."""

    uses_progress: ClassVar[bool]
    """Whether a choice can depend on how far a running answer has come. Where not, nobody need tell the router."""

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """The name of one of `workers`. May refill credits, charges nothing. None: see `Holding`."""
        ...

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """The request was sent to `worker`."""
        ...

    def done(self, ended: Ended, now_s: float) -> None:
        """The request is over."""
        ...

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """`worker` is new, or back with nothing of what it had."""
        ...

    def worker_changed(self, worker: str, capacity: float) -> None:
        """`worker` is as it was, but of another capacity."""
        ...

    def worker_down(self, worker: str) -> None:
        """`worker` is gone."""
        ...

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """Client -> worker -> credit left, of `limit` clients at most, the latest first; empty if none."""
        ...


@runtime_checkable
class Holding(Protocol):
    """What a placement adds that lets requests wait with it, until a worker is ready for one.

    Its `place` returns None: the request is its own now. The core promises to ask `next` after everything
    that happens while requests wait; each request leaves by `next`, followed by `placed`, or by `give_up`.
    """

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match]
    ) -> tuple[Request, str] | None:
        """A request that leaves the queue now, and the name of one of `workers`; None: the others wait on."""
        ...

    def give_up(self, request: Request) -> None:
        """`request` waits no more: whoever asked has gone, or was served elsewhere."""
        ...


class Memoryless:
    """What a placement does that decides by what it is shown: it remembers nothing."""

    uses_caches: ClassVar[bool] = True
    uses_progress: ClassVar[bool] = True

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Changes nothing."""

    def done(self, ended: Ended, now_s: float) -> None:
        """Changes nothing."""

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """Changes nothing."""

    def worker_changed(self, worker: str, capacity: float) -> None:
        """Changes nothing."""

    def worker_down(self, worker: str) -> None:
        """Changes nothing."""

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """None are kept."""
        return {}


_by_tokens = attrgetter("dispatched_tokens", "name")

_W = TypeVar("_W", bound=WorkerView)


def least(workers: Sequence[_W], costs: Sequence[float]) -> _W:
    """The worker of least cost, one cost each; among equals, who was sent fewer tokens so far; then by name."""
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return workers[costs.index(lowest)]
    best = [worker for worker, cost in zip(workers, costs, strict=True) if cost == lowest]
    return min(best, key=_by_tokens)


def least_loaded(workers: Sequence[WorkerView]) -> str:
    """The least loaded of `workers`; among equals as in `least`."""
    return least(workers, [worker.load for worker in workers]).name
