"""What a placement sees, what it decides, and what it learns.

A placement answers one question: which worker for this request? Loads come with `workers` and cached prefixes with
`match`, both from the router's core. What else it keeps is its own, and bounded in clients and requests.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import msgspec

from router.events import Outcome
from router.radix import Match
from sglang_fair.common.deadlines import Promise
from sglang_fair.common.weights import Weights


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request that needs a worker. `tokens` is its prompt, of `input_tokens` tokens."""

    id: str
    client: str
    tokens: bytes
    input_tokens: int
    max_output_tokens: int = 0
    expected_output_tokens: float = 0.0
    """From the client's past answers, never more than the request's own limit."""
    namespace: str = ""
    exclude: tuple[str, ...] = ()
    """Workers that must not get it. `workers` never has them."""
    call: int = 0
    """Its number in its interaction, from 1; 0: it names none."""
    model: str = ""
    """That must answer it; "" where there is one only."""
    promise: Promise | None = None
    """By when its first token is due, by the clock of `now_s`; None: nobody has said."""
    stands_for: int = 1
    """Requests of its client, model and deadline that it stands for, itself among them: more than itself where most of
    a batch's lines are not here yet."""
    session: str = ""
    """Which of its client's sessions sends it."""
    tier: int = 0
    """1: it was placed ahead of its client's share."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """A placed request that is over, however it ended."""

    request: Request
    worker: str
    matched_tokens: int
    output_tokens: int
    outcome: Outcome
    ttft_s: float | None = None
    tpot_s: float | None = None


class WorkerView(Protocol):
    """A worker that is up, as a placement sees it: not to be written to. Loads are of the requests that were sent there
    and are not over."""

    name: str
    """Unique among the workers."""
    capacity: float
    """Its speed relative to a worker of capacity 1."""
    load: float
    """Requests in flight, divided by its capacity: s_w of D2LPM."""
    prefill_tokens: int
    """Prompt tokens, without those taken to be cached there, of requests that have no output yet."""
    decode_tokens: float
    """Output tokens still to come, estimated from each client's past answers and the requests' own limits."""
    dispatched: int
    """Requests sent to it so far."""
    dispatched_tokens: int
    """Prompt tokens sent to it so far. It breaks ties: fewer comes first."""
    prefilled_tokens: int
    """Prompt tokens that were not taken to be cached there, of requests that have output by now or had; so far."""
    produced_tokens: int
    """Output tokens that were reported so far."""
    overrun_tokens: int
    """By how much the answers in flight are already longer than was expected. What is in flight are more often the long
    ones, so this is a large part of what a full worker holds."""


May = Callable[[Request, str], bool]
"""Whether a worker may have a request: it has the request's model, and the request does not exclude it."""

Work = Callable[[], object]
"""A pure function with its arguments, to be called in another process: it and what it returns can be pickled."""


class Equipment(NamedTuple):
    """What a worker has."""

    loaded: str | None
    """The model; None: none that can serve, because it loads one."""
    swap_s: Mapping[str, float] = {}
    """The models that it can load, its own among them, each with about how many seconds that takes. Empty without an
    agent."""
    kv_tokens: int | None = None
    """Of its cache; None: not known, or as before."""
    chunk_tokens: int | None = None


class Placement:
    """Chooses workers. Deterministic: the same calls give the same choices, and every order that it uses is total. Each
    model has a placement of its own, which knows of that model's workers only; one that `holds` requests has them all.

    The core promises:

    * `workers` is never empty, in the order of names, and without those that the request excludes, or that do not have
      its model.
    * `worker_up` comes before a worker is in `workers`; `worker_down` after `done` of all that was placed there.
    * Each `place` that names a worker is followed by `placed` of the same request, each `placed` by one `done`.
    * `placed` without `place` is a request that came to its worker without this router; that may be any worker
      that is up.
    * `now_s` never falls.
    """

    uses_caches: ClassVar[bool] = True
    """Whether a choice can depend on what workers have cached. If not, the router need not know."""

    uses_progress: ClassVar[bool] = True
    """Whether a choice can depend on how far running answers are. If not, the router need not know."""

    holds: ClassVar[bool] = False
    """Whether it lets requests wait, those for which its `place` returns None, until a worker is ready for one. Each
    leaves by `next`, followed by `placed`, or by `give_up`."""

    loads: ClassVar[bool] = False
    """Whether it holds requests and says which models workers load. The core then also asks `place` about requests for
    a model that no worker has and some worker can load: with no workers, and the request is held. What is wanted is not
    always done: a model that could not be loaded is not tried again for some time."""

    plans: ClassVar[bool] = False
    """Whether it holds requests with deadlines, in an order of which people, metrics and throttling read."""

    def place(
        self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float
    ) -> str | None:
        """The name of one of `workers`; None if the request must wait (`holds`). It may refill credits only."""
        raise NotImplementedError

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """The request was sent to `worker`."""

    def done(self, ended: Ended, now_s: float) -> None:
        """The request is over."""

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """`worker` is new, or is back without anything that it had before."""

    def worker_changed(self, worker: str, capacity: float) -> None:
        """`worker` has another capacity; everything else is as before."""

    def worker_down(self, worker: str) -> None:
        """`worker` is gone."""

    @property
    def weights(self) -> Weights | None:
        """The clients' shares, which the core keeps up to date; None: it has no shares."""
        return None

    def reweighed(self, client: str) -> None:
        """The weight of `client` has changed."""

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """Client -> worker -> credit, for at most `limit` clients, the latest first. Empty if there are no credits."""
        return {}

    def costs(self) -> Sequence[float] | None:
        """What its last `place` weighed, for each of `workers`: less is better, inf is out of the question. None: it
        does not weigh workers by one number each."""
        return None

    def question(self, now_s: float) -> tuple[int, Work] | None:
        """A number and work for another process, while it goes on with what it has; None mostly, at no cost. Asked for
        after each event. A question before the last one was answered ends that one."""
        return None

    def answer(self, number: int, found: object, now_s: float) -> None:
        """What the work of question `number` has returned; None: it failed, or its process has ended."""

    # -- one that `holds`

    def next(
        self, workers: Sequence[WorkerView], match: Callable[[Request], Match], may: May, now_s: float
    ) -> tuple[Request, str] | None:
        """A request that leaves the queue now, and the name of one of `workers` that may have it; None if all must
        wait. `workers` have any models. Called after everything that happens while requests wait."""
        raise NotImplementedError

    def give_up(self, request: Request) -> None:
        """`request` leaves the queue: its gateway is gone or has withdrawn it, or it was served elsewhere."""

    # -- one that `loads`

    def equip(self, worker: str, has: Equipment, now_s: float) -> None:
        """What a worker that is up has: after each `worker_up`, and when something changes. Nothing is in flight there
        when it has another model."""

    def taking(self, workers: Collection[str]) -> None:
        """These take new requests, now or when they have loaded another model, and no other. Told when that changes."""

    def wanted(self, worker: str) -> str | None:
        """The model that a worker that serves should have, after everything that happens; None: whichever it has."""
        return None

    def next_models(self, worker: str) -> Sequence[str]:
        """The models that it is going to need after that, soonest first."""
        return ()

    # -- one that `plans`

    def tier(self, request_id: str) -> int:
        """Of a request that is about to be `placed`: 0 within its client's share, 1 ahead of it."""
        return 0

    def late(self, now_s: float) -> Collection[str]:
        """The workers at which requests within their client's share will miss a deadline, now and at the look before:
        no order has helped. O(1)."""
        return ()

    def report(self, now_s: float) -> Mapping[str, object] | None:
        """The queues as plain maps, lists, numbers and strings. `shortage`: what would do if deadlines cannot be met,
        with `more` and `least` replicas, by `models`, `why`, and `for_s` seconds already; None if they can."""
        return None

    def standing(self, request_id: str, now_s: float, *, ahead: bool = True) -> Mapping[str, object] | None:
        """Where a request that waits stands, as `sglang_fair.cluster.queues.told_standing` shows it; None if it does
        not wait. With `ahead` also what is before it."""
        return None


_W = TypeVar("_W", bound=WorkerView)


def least(workers: Sequence[_W], costs: Sequence[float], sent: str = "dispatched_tokens") -> _W:
    """The worker with the least of `costs`, one for each. Ties: less `sent` so far, then by name."""
    lowest = min(costs)
    if costs.count(lowest) == 1:
        return workers[costs.index(lowest)]
    best = [worker for worker, cost in zip(workers, costs, strict=True) if cost == lowest]
    return min(best, key=attrgetter(sent, "name"))


def least_loaded(workers: Sequence[WorkerView]) -> str:
    """The name of the least loaded worker. Ties as in `least`."""
    return least(workers, [worker.load for worker in workers]).name
