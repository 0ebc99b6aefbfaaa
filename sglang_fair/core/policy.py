"""The interface of a scheduling policy, which answers one question: who goes next?

A policy orders the waiting requests of one replica. It knows nothing of memory, batches or text. `FairQueue` and its
`Account` report to it what happened, and ask it for the next candidate; the engine admits the candidate or stops. So
the same policy object runs in SGLang's scheduler, in the simulator and in a property test.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.job import Job
from sglang_fair.core.predictor import Predictor

OPTION = "option"
"""Key of a dataclass field's metadata: the name of the option, where that differs from the field's."""


class Policy(ABC):
    """Which waiting request goes next?

    The caller promises:
    - `refuses` and then `arrive` before any other call about a job;
    - `leave` exactly once, when the job stops waiting because it was admitted or aborted;
    - `charge` as soon as service was given, so that the next `pick` sees it;
    - `hold` only for the job that `pick` returned, and `release` before the next pass;
    - times that never go back.

    The policy promises:
    - `pick` returns a waiting job that is not held, of a client that is not set aside. It returns None only if no such
      client waits, or it is the turn of clients whose jobs are held, or all have to wait for a later `tick`. Calling it
      again changes nothing;
    - orders are total: the same calls give the same picks;
    - memory is O(waiting jobs + clients with a debt).
    """

    name: ClassVar[str]

    may_refuse: ClassVar[bool] = False
    """`refuses` may give a reason; the sender then gets HTTP status 429. Otherwise `refuses` is not called."""

    waits_for_prefixes: ClassVar[bool] = False
    """A request is passed over while its uncached prefix is being computed for another one. Only for policies that
    follow the cache and whose guarantee survives it: under VTC others would be served in the client's turn."""

    keeps_bound_with_transfers: ClassVar[bool] = False
    """`bound` also holds if clients are charged or refunded at other times than when they are served, provided that
    what this adds to a counter is added to `input_units` (`payers.Swing`)."""

    shares_steps: ClassVar[bool] = False
    """Clients that run have a share of the engine's time beside those whose prompts are computed (`steps`). Not for the
    baselines, under which the client that sends most gets most."""

    keeps_places: ClassVar[bool] = False
    """Where room is short, a client that has more requests running than others that wait is set aside for these
    (`steps`). Not where only one client has its turn: the room would stay empty, and by its counter it has not had what
    the others had."""

    turn_cause: ClassVar[str | None] = None
    """What a client waits for that has not its turn (`waits`). None: all that wait always have it."""

    refills: int | None = None
    """How often rounds had to pass because no client that waits had credit. None: there are no rounds."""

    scales: bool = False
    """`scale` may be other than 1. It is then charged prices, not costs."""

    price: Cost | None = None
    """What this policy counts for service, before the scale. None: its cost. The books are in costs."""

    system_surcharge: float = 0.0
    """What a computed token of a system prompt counts more than another one, before the scale."""

    evictions: int = 0
    """How often a running request may be taken back for a more urgent one (`preemption`); 0: none is."""

    charges_at_end: bool = False
    """All charges of a request come together, when it ends."""

    weights: Weights | None = None
    """The clients' shares. None: the policy has no shares."""

    cost: Cost = Linear()
    """What service costs, for policies that look ahead. `FairQueue` sets it to what it charges by."""

    predictor: Predictor | None = None
    """Predicts the outputs, which are then charged at admission. None: they are charged as they are made."""

    def tick(self, now_s: float) -> None:
        """It is `now_s`, by a clock that never goes back. Called before each arrival and each pass."""

    def refuses(self, job: Job) -> str | None:
        """Why the new `job` may not wait here, in words for its sender. None: it may."""
        return None

    @abstractmethod
    def arrive(self, job: Job) -> None:
        """`job` joined the queue."""

    @abstractmethod
    def leave(self, job: Job) -> None:
        """`job` stopped waiting."""

    def reweigh(self, client: str) -> None:
        """The weight of `client` has changed."""

    def rematch(self, job: Job) -> None:
        """`job.prefix_tokens` has changed while `job` waits."""

    @abstractmethod
    def pick(self) -> Job | None:
        """The job to try next; see the promises above for None."""

    @abstractmethod
    def hold(self, job: Job) -> None:
        """Pass `job` over until `release`: it still waits, but cannot be admitted in this pass."""

    def set_aside(self, test: Callable[[Job], bool]) -> Sequence[str]:
        """While `test` of the job that `pick` would return holds, pass all jobs of its client over until `release`.
        Returns these clients. They keep their turn, so that the bound holds: others go on as far as they might while
        all their jobs are held. Only for policies that share steps."""
        raise NotImplementedError(f"{self.name} sets no client aside")

    @abstractmethod
    def release(self) -> None:
        """A new pass begins: held jobs may be picked again."""

    def charge(self, client: str, units: float) -> None:
        """`client` received `units` of service, in units of the cost function.

        Negative if something that was charged ahead is given back. The charges of a request sum to its cost.
        """

    def scale(self, job: Job) -> float:
        """Units of this policy for each unit of the cost function; read once, when `job` is admitted. The books stay
        in units of the cost function."""
        return 1.0

    idle_first: bool = False
    """Among clients that may go, one that runs nothing goes first."""

    def runs(self, client: str, any_request: bool) -> None:
        """A first request of `client` runs, or none any more."""

    def ended(self, job: Job) -> None:
        """`job`, which had been admitted, has ended, by itself or by abort, and was charged in full."""

    def admitted(self, job: Job) -> None:
        """`job` was admitted and its first chunk was charged."""

    def borrows(self, client: str) -> bool:
        """Whether a request of `client` that is admitted now is admitted although its counter is not positive."""
        return False

    def idle(self, client: str) -> None:
        """`client` has neither a waiting nor a running request any more."""

    def turns(self) -> Mapping[str, bool]:
        """Of the clients that wait, those whose turn has come (True) or is no more (False) since the last call. A
        client has its turn unless this has said otherwise since it began to wait. O(what changed)."""
        return {}

    def has_turns(self) -> bool:
        """Whether a client without its turn waits for others' turns, and not only for the next `pick`."""
        return True

    def counters(self) -> Mapping[str, float]:
        """Each known client's counter, for people: a deficit (larger is better off) or a virtual counter."""
        return {}

    def counter(self, client: str) -> float | None:
        """The same of one client, in O(1), amortised. None: it is not known, or the policy keeps none."""
        return None

    def bound(self, input_units: float, output_units: float, weight: float = 1.0) -> float | None:
        """The guarantee: how far the service, divided by weight, of two clients that both wait can differ.

        Where weights change, each charge counts by its client's weight at that time. `weight` is the least of these,
        `input_units` the cost of the dearest prompt, `output_units` that of the most output which one client's running
        requests may still make. None: the policy guarantees nothing.
        """
        return None

    def owes(self, client: str) -> bool:
        """Whether what `client` was charged is not paid back yet, so that its counter may be far from others'."""
        return False


DEFAULT_QUANTUM = 2000.0
"""Service units that a client gets at a time by default."""

LEAST_QUANTUM = 1e-6
"""Smallest quantum, in service units: so far below the cost of one token that a smaller one changes no order, and large
enough that the rounds of the deepest debt can be counted."""


def checked_quantum(quantum: float) -> float:
    """`quantum`; ValueError unless it is a finite number from `LEAST_QUANTUM`."""
    if not LEAST_QUANTUM <= quantum < inf:
        raise ValueError(
            f"quantum must be a positive number of service units, at least {LEAST_QUANTUM:g}, not {quantum!r}"
        )
    return quantum
