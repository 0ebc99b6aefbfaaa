"""WSC, the weighted service counter: VTC on service over what is normal for the application (FairServe, section 3.2).

A request is charged its cost divided by w, what a normal call of its (app, stage) costs (Equation 2; `normal`). So an
average call counts 1, whatever the application, and an interaction of m average calls counts m. The scale is fixed when
the request is admitted. The price is the cost function's, with 1 and 2 as default; the paper's text has 1, 2, 1 for
input, system prompt and output, and its figures read like 1, 1, 2.

*Interactions first, within a lead.* The paper lets calls of interactions that have begun pass everybody. A client that
keeps interactions open then starves the others. Here such a call goes first only while its client's counter is at most
`lead` above the smallest of those who wait; `lead` = inf is the paper's rule, and 0 leaves WSC without it.

Unit of fairness: normalised service, in average calls. While the smallest counter waits, nobody is admitted whose
counter is more than `lead` above it, and what it is charged later was running then: counters of clients that wait
differ by U + lead at most, U the normalised cost of the requests that fit a batch, and what two backlogged clients
received by 2·(U + lead). With `lead` = inf there is no bound.
Knobs: `lead`, `spread` (how far a weight may be from the usual), `charge` "on_finish" as in the paper, where one client
can fill a batch before anything of it is charged.
Trade-off: no locality (`wsc-dlpm` has it). Known leaks: those of VTC; a call that names a dearer application pays up to
`spread` times less, or `spread`² if the honest weight was at the other end.
"""

from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

from sglang_fair.core.clients import ClientQueues, by_arrival
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.lpm import longest_prefix
from sglang_fair.core.normal import Normal
from sglang_fair.core.vtc import Vtc

CHARGES = ("incremental", "on_finish")


def is_started(job: Job) -> bool:
    """Whether an earlier call of its interaction was accepted."""
    return job.call > 1


def started_first(job: Job) -> Any:
    return (not is_started(job), job.arrival)


def started_then_longest_prefix(job: Job) -> Any:
    return (not is_started(job), *longest_prefix(job))


def _learn(normal: Normal, job: Job) -> None:
    if job.output_tokens:  # a call that made nothing says nothing of what is normal
        normal.learn(job.client, job.app, job.stage, job.extend_tokens, job.output_tokens)


@dataclass
class Wsc(Vtc):
    """Smallest normalised counter first; calls of interactions that have begun before it, within `lead`.

    ValueError for a negative `lead`, a `spread` below 1 and an unknown `charge`.
    """

    name: ClassVar[str] = "wsc"
    scales: ClassVar[bool] = True
    lead: float = 2.0
    spread: float = 8.0
    charge_when: str = "incremental"
    normal: Normal = field(init=False, repr=False)
    _started: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients whose first waiting request continues an interaction."""

    def __post_init__(self) -> None:
        if not self.lead >= 0:
            raise ValueError(f"lead must be a number from 0 on, not {self.lead!r}")
        if self.charge_when not in CHARGES:
            raise ValueError(f"charge_when is one of {', '.join(CHARGES)}, not {self.charge_when!r}")
        self.charges_at_end = self.charge_when == "on_finish"
        self._queues = ClientQueues(started_first if self.lead else by_arrival)
        self.normal = Normal(self._price, self.spread)

    def _price(self, extend: float, output: float) -> float:
        return self.cost(round(extend), round(output), 0)

    def scale(self, job: Job) -> float:
        return 1 / self.normal.weight(job.app, job.stage)

    def ended(self, job: Job) -> None:
        _learn(self.normal, job)

    def pick(self) -> Job | None:
        """As VTC, but the client with the smallest counter among those whose next call continues an interaction goes
        first, if that is at most `lead` above the smallest counter of all that wait."""
        client = self._started.first()
        if client is not None and self._counter[client] <= self._floor() + self.lead:
            return self._queues.head(client)
        return super().pick()

    def bound(self, input_units: float, output_units: float) -> float | None:
        """2·(U + lead) in normalised units, U over the least weight. None for an infinite lead, and if requests are
        charged when they end: U then has all prompts of a batch, which are not counted."""
        of_vtc = super().bound(input_units, output_units)
        return None if of_vtc is None or self.lead == inf or self.charges_at_end else of_vtc + 2 * self.lead

    def _seat(self, client: str) -> None:
        super()._seat(client)
        head = self._queues.head(client)
        if self.lead and head is not None and is_started(head):
            self._started.put(client, (self._counter[client], head.arrival))
        else:
            self._started.discard(client)


@dataclass
class WscDlpm(Dlpm):
    """DLPM with normalised charges: among clients with credit, calls of interactions that have begun go first, then the
    longest prefix. Any order among them keeps Theorem 4.1, so the bound is DLPM's, in average calls, and putting
    interactions first costs nothing. `quantum` is in average calls.
    """

    name: ClassVar[str] = "wsc-dlpm"
    scales: ClassVar[bool] = True
    keeps_bound_with_transfers: ClassVar[bool] = False
    quantum: float = 2.0
    spread: float = 8.0
    normal: Normal = field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._queues = ClientQueues(started_then_longest_prefix, self.patience)
        self.normal = Normal(self._price, self.spread)

    def _price(self, extend: float, output: float) -> float:
        return self.cost(round(extend), round(output), 0)

    def scale(self, job: Job) -> float:
        return 1 / self.normal.weight(job.app, job.stage)

    def ended(self, job: Job) -> None:
        _learn(self.normal, job)

    def _order(self, head: Job) -> Any:
        return started_then_longest_prefix(head)
