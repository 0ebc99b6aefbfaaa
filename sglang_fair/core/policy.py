"""What a scheduling policy sees of a request, and the one question it answers: who goes next?

A policy orders the waiting requests of one replica. It does not know memory, batches or tokens of text:
`FairQueue` tells it what happened and asks it for the next candidate; the engine admits the candidate or
stops. So one policy object runs in SGLang's scheduler, in a simulator and in a property test.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import inf
from typing import ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.job import Job
from sglang_fair.core.predictor import Predictor


class Policy(ABC):
    """Which waiting request goes next?

    The caller promises: `refuses` and then `arrive` before anything else of a job; `leave` exactly once when
    the job stops waiting, whether it was admitted or aborted; `charge` at once when service was given, so that
    the next `pick` sees it; `hold` only for the job that `pick` returned, and `release` before the next pass;
    times that never fall.

    The policy promises: `pick` changes nothing that a second call would see (a refill that was due counts
    once); it returns a waiting job that is not held, or None; it returns None only if no job waits, or
    the held jobs' clients are the ones whose turn it is, or all have to wait for a later `tick`. Its orders are
    total: the same calls give the same picks. Memory is O(waiting jobs + clients with a debt).
    """

    name: ClassVar[str]

    may_refuse: ClassVar[bool] = False
    """`refuses` may say no, which its sender is told by HTTP status 429. Otherwise nobody is asked."""

    waits_for_prefixes: ClassVar[bool] = False
    """Requests whose uncached prefix is being computed are passed over meanwhile. Only for policies that follow
    the cache and whose guarantee survives it: under VTC others would be served in the client's turn."""

    keeps_bound_with_transfers: ClassVar[bool] = False
    """`bound` holds when a client is also charged, or given back, units at other times than its own service, if
    what this adds to a counter is added to `input_units` (`payers.Swing`)."""

    weights: Weights | None = None
    """The clients' shares. None: everybody is served alike."""

    predictor: Predictor | None = None
    """Predicts the outputs, which are then charged at admission. None: they are charged as they are made."""

    def tick(self, now_s: float) -> None:
        """It is `now_s` by a clock that never goes back. Said before each arrival and each pass."""

    def refuses(self, job: Job) -> str | None:
        """Why `job`, which has just come, may not wait here, in words for its sender; None: it may."""
        return None

    @abstractmethod
    def arrive(self, job: Job) -> None:
        """`job` joined the queue."""

    @abstractmethod
    def leave(self, job: Job) -> None:
        """`job` stopped waiting."""

    def rematch(self, job: Job) -> None:
        """`job.prefix_tokens` of a waiting job has changed."""

    @abstractmethod
    def pick(self) -> Job | None:
        """The job to admit next."""

    @abstractmethod
    def hold(self, job: Job) -> None:
        """Pass `job` over until `release`: it still waits, but the engine cannot take it in this pass."""

    @abstractmethod
    def release(self) -> None:
        """A new pass begins: held jobs may be picked again."""

    def charge(self, client: str, units: float) -> None:
        """`client` received `units` of service (the cost function's units).

        Negative: what was charged ahead was not used. Over a request's life the charges sum to its cost.
        """

    def admitted(self, job: Job, input_units: float, output_units: float) -> None:
        """`job` was admitted, and what the engine computes first of it was charged. The units are those of
        `bound`: the dearest so far."""

    def idle(self, client: str) -> None:
        """`client` has no request here any more, neither waiting nor running."""

    def counters(self) -> Mapping[str, float]:
        """Each known client's counter, for people: a deficit (more is better off) or a virtual counter."""
        return {}

    def bound(self, input_units: float, output_units: float) -> float | None:
        """Largest difference between two clients that both have requests waiting, of service divided by weight.

        `input_units` is the dearest single prompt, `output_units` the dearest output still owed at one
        time to one client's running requests. None: the policy guarantees nothing.
        """
        return None


LEAST_QUANTUM = 1e-6
"""Smallest quantum, in service units: far below the cost of one token, where a smaller one changes no order, and
far enough from 0 that the rounds of the deepest debt can be counted."""


def checked_quantum(quantum: float) -> float:
    """`quantum`; ValueError unless it is a finite number from `LEAST_QUANTUM`."""
    if not LEAST_QUANTUM <= quantum < inf:
        raise ValueError(
            f"quantum must be a positive number of service units, at least {LEAST_QUANTUM:g}, not {quantum!r}"
        )
    return quantum
