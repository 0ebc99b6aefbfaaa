"""WSC, the weighted service counter: VTC on service over what is normal for the application (FairServe, section 3.2).

A request is charged its cost divided by w, what a normal call of its (app, stage) costs (Equation 2; `normal`). So an
average call counts 1, whatever the application, and an interaction of m average calls counts m. The scale is fixed when
the request is admitted. Prices are 1, 1 and 2 for computed tokens of the input, of the system prompt and of the output;
the paper's text has 1, 2, 1 (`literal`), and argues as if for ours.

*Interactions first, within a lead.* The paper lets calls of interactions that have begun pass everybody. A client that
keeps interactions open then starves the others. Here such a call goes first only while its client's counter is at most
`lead` above the smallest of those who wait; `lead` = inf is the paper's rule, and 0 leaves WSC without it.

Unit of fairness: normalised service, in average calls. While the smallest counter waits, no client is admitted whose
counter is more than `lead` above it, and what it is charged later was running then: counters of clients that wait
differ by U + lead at most, U the normalised cost of the requests that fit a batch, and what two backlogged clients
received by 2·(U + lead). With `lead` = inf there is no bound.
Knobs: `lead`; `spread`, how far a weight may be from the usual; the prices; `charge` "on_finish" as in the paper, where
one client can fill a batch before anything of it is charged.
Trade-off: no locality (`wsc-dlpm` has it). Known leaks: those of VTC; a call that names a dearer application pays up to
`spread` times less, or `spread`² if the honest weight was at the other end.
"""

import sys
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar

from sglang_fair.core.clients import PATIENCE, ClientQueues, by_arrival
from sglang_fair.core.cost import Linear
from sglang_fair.core.dlpm import Dlpm
from sglang_fair.core.fcfs import longest_prefix
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.normal import Normal
from sglang_fair.core.policy import OPTION, Policy
from sglang_fair.core.vtc import Vtc

CHARGES = ("incremental", "on_finish")

LITERAL = 1.0, 2.0, 1.0
"""Prices of input, system prompt and output in the paper's text."""


def is_started(job: Job) -> bool:
    """Whether an earlier call of its interaction was accepted."""
    return job.call > 1


def started_first(job: Job) -> Any:
    return (not is_started(job), job.arrival)


def started_then_longest_prefix(job: Job) -> Any:
    return (not is_started(job), *longest_prefix(job))


@dataclass
class Normalised(Policy):
    """What both policies have in common: prices, and what is normal.

    A computed token of a system prompt is learnt as so many others as it costs. ValueError for a `spread` below 1, for
    a price that is negative or not finite, and for an `input_price` of 0.
    """

    scales = True
    spread: float = 8.0
    input_price: float = 1.0
    system_price: float = 1.0
    output_price: float = 2.0
    literal: bool = False
    """The prices of the paper's text, whatever the others say."""
    normal: Normal = field(init=False, repr=False)

    def _set_prices(self) -> None:
        if self.literal:
            self.input_price, self.system_price, self.output_price = LITERAL
        for name in ("input_price", "system_price", "output_price"):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be a number from 0 on, not {getattr(self, name)!r}")
        if not self.input_price:
            raise ValueError("input_price cannot be 0: the other prices are relative to it")
        self.price = Linear(self.input_price, self.output_price)
        self.system_surcharge = self.system_price - self.input_price
        self.normal = Normal(self._price_of, self.spread)

    def scale(self, job: Job) -> float:
        return 1 / self.normal.weight(job.app, job.stage)

    def ended(self, job: Job) -> None:
        if job.output_tokens:  # a call that made nothing says nothing of what is normal
            dearer = self.system_surcharge / self.input_price * job.system_extend_tokens
            self.normal.learn(job.client, job.app, job.stage, job.extend_tokens + dearer, job.output_tokens)

    def _price_of(self, extend_tokens: float, output_tokens: float) -> float:
        return self.input_price * extend_tokens + self.output_price * output_tokens


@dataclass
class Wsc(Normalised, Vtc):
    """Smallest normalised counter first; calls of interactions that have begun before it, within `lead`.

    ValueError for a negative `lead`, an unknown `charge`, and as `Normalised`.
    """

    name: ClassVar[str] = "wsc"
    lead: float = 2.0
    charge_when: str = field(default="incremental", metadata={OPTION: "charge"})
    _started: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Clients whose first waiting request continues an interaction."""

    def __post_init__(self) -> None:
        self._set_prices()
        if not self.lead >= 0:
            raise ValueError(f"lead must be a number from 0 on, not {self.lead!r}")
        if self.charge_when not in CHARGES:
            raise ValueError(f"charge is one of {', '.join(CHARGES)}, not {self.charge_when!r}")
        self.charges_at_end = self.charge_when == "on_finish"
        # The paper's rule is strict: no call waits for so long that it goes before one whose interaction has begun.
        patience = PATIENCE if self.lead < inf else sys.maxsize
        self._queues = ClientQueues(started_first if self.lead else by_arrival, patience)

    def pick(self) -> Job | None:
        """As VTC, but the client with the smallest counter among those whose next call continues an interaction goes
        first, if that is at most `lead` above the smallest counter of all that wait."""
        client = self._first_started()
        return super().pick() if client is None else self._queues.head(client)

    def bound(self, input_units: float, output_units: float, weight: float = 1.0) -> float | None:
        """2·(U + lead) in normalised units, U over the least weight. None for an infinite lead, and if requests are
        charged when they end: U then has all prompts of a batch, which are not counted."""
        of_vtc = super().bound(input_units, output_units, weight)
        return None if of_vtc is None or self.lead == inf or self.charges_at_end else of_vtc + 2 * self.lead

    def _first_started(self) -> str | None:
        client = self._started.first()
        return None if client is None or self._counter[client] > self._floor() + self.lead else client

    def _next(self) -> str | None:
        return self._first_started() or super()._next()

    def _seat(self, client: str) -> None:
        super()._seat(client)
        head = self._queues.head(client)
        if self.lead and head is not None and is_started(head):
            self._started.put(client, (self._counter[client], head.arrival))
        else:
            self._started.discard(client)


@dataclass
class WscDlpm(Normalised, Dlpm):
    """DLPM with normalised charges: among clients with credit, calls of interactions that have begun go first, then the
    longest prefix. Any order among them keeps Theorem 4.1, so the bound is DLPM's, in average calls, and putting
    interactions first costs nothing. `quantum` is in average calls.
    """

    name: ClassVar[str] = "wsc-dlpm"
    keeps_bound_with_transfers: ClassVar[bool] = False
    quantum: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set_prices()
        self._queues = ClientQueues(started_then_longest_prefix, self.patience)

    def _order(self, head: Job) -> Any:
        return started_then_longest_prefix(head)

    def _prices(self, job: Job, cached_tokens: int) -> tuple[float, float]:
        """In average calls, as the quantum is."""
        scale = self.scale(job)
        own = self._price_of(max(0, job.prompt_tokens - cached_tokens), job.max_output_tokens)
        return scale * own, scale * self._price_of(cached_tokens, 0)
