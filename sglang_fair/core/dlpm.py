"""DLPM, deficit longest prefix match: LPM order among the clients that have not used up their quantum.

Rule: each client has a deficit counter q; while it is positive the client's requests may be admitted. Extend and output
tokens are charged to it; cached tokens are free. When every client with a waiting request has used up its quantum,
rounds pass until one of them is positive again: in each round every known client with q <= 0, waiting or not, gets one
quantum (DLPM, Algorithm 1). Debts survive leaving; credit never exceeds Q^u.

Rounds are counted, not executed: a client with q <= 0 turns positive n = floor(-q / Q^u) + 1 rounds after its account
was last settled, and a refill advances the current round to the first of those among the waiting clients. O(log
clients) for any number of rounds.

Unit of fairness: service units. Bound: two clients that both wait never differ by more than 2·(U + Q^u),
U = w_e·L_input + w_q·M (Theorem 4.1), with `borrow` (ours) 2·(U + 2·Q^u): a client without credit may then finish its
run on a cached prefix, for at most Q^u. New clients start with a quantum, within an allowance (`newcomers`), and go
first until they are charged; the theorem holds for any order among clients with a positive counter.
A client that is gone keeps its debt, and its credit unless more than `remembered_clients` with credit are gone. No new
client starts with more than the least credit that was ever forgotten, so being forgotten never pays.
Knobs, trade-offs, leaks, proofs: docs/policies.md, `dlpm`.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any, ClassVar

from sglang_fair.common.weights import Weights
from sglang_fair.core.clients import PATIENCE, ByClient, ClientQueues
from sglang_fair.core.fcfs import longest_prefix
from sglang_fair.core.heap import LazyHeap
from sglang_fair.core.job import Job
from sglang_fair.core.newcomers import Newcomers, Standing
from sglang_fair.core.parked import Parked
from sglang_fair.core.policy import DEFAULT_QUANTUM, checked_quantum
from sglang_fair.core.predictor import Predictor
from sglang_fair.core.waits import DEFICIT


@dataclass(slots=True)
class Deficit(Standing):
    """One client's counter: `units` as of round `settled`.

    `refund` is credit beyond one quantum: refunds of predicted output that came when the counter was full. The next
    charges are paid from it first, so it is neither lost nor spent faster than credit.
    """

    units: float = 0.0
    settled: int = 0
    refund: float = 0.0
    borrowed: float = 0.0
    """Prices of the requests admitted since `units` was last positive."""


@dataclass
class Dlpm(ByClient):
    """Longest prefix first among clients with a positive deficit counter.

    `quantum` is Q^u in service units. A charge is divided by the client's weight, so weight 2 gets twice the service
    per quantum. A request that `patience` later ones of its client have overtaken goes first within its client.
    `remembered_clients` is how many absent clients keep their credit; debts are always kept. New clients may use
    `newcomers` units for each unit that known clients get; with 0 they start at 0, as in the paper.
    With `borrow` above 0, requests are admitted for a client without credit that cost at most this part of their cached
    prefix. Raises ValueError for a quantum below `LEAST_QUANTUM`, a patience below 1, and a negative `newcomers` or
    `borrow`.
    """

    name: ClassVar[str] = "dlpm"
    turn_cause: ClassVar[str] = DEFICIT
    waits_for_prefixes: ClassVar[bool] = True
    shares_steps: ClassVar[bool] = True
    keeps_places: ClassVar[bool] = True
    keeps_bound_with_transfers: ClassVar[bool] = True
    newcomers_first: ClassVar[bool] = True
    """A client that was welcomed goes before all others until it is charged."""
    quantum: float = DEFAULT_QUANTUM
    weights: Weights = field(default_factory=Weights)
    patience: int = PATIENCE
    newcomers: float = 4.0
    borrow: float = 0.0
    remembered_clients: int = 10_000
    predictor: Predictor | None = None

    refills: int = field(default=0, init=False)
    """How often rounds had to pass because no waiting client was positive."""
    _round: int = field(default=0, init=False, repr=False)
    _deficits: dict[str, Deficit] = field(default_factory=dict, init=False, repr=False)
    _ready: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    _parked: Parked = field(default_factory=Parked, init=False, repr=False)
    _heads: dict[str, Job] = field(default_factory=dict, init=False, repr=False)
    """Of clients that wait: the first job that is not held."""
    _debtors: LazyHeap[str] = field(default_factory=LazyHeap, init=False, repr=False)
    """Absent clients in debt, by the round that makes them positive."""
    _creditors: OrderedDict[str, None] = field(default_factory=OrderedDict, init=False, repr=False)
    """Absent clients with credit, the longest absent first."""

    _running: set[str] = field(default_factory=set, init=False, repr=False)
    """Clients that run something, with `idle_first`."""
    _borrower: Job | None = field(default=None, init=False, repr=False)
    """The job that left the queue last, if its client had no credit."""
    _new: Newcomers = field(init=False, repr=False)
    _least_dropped: float = field(default=inf, init=False, repr=False)
    """The least credit that was forgotten with a client."""

    def __post_init__(self) -> None:
        self.quantum = checked_quantum(self.quantum)
        if self.remembered_clients < 0:
            raise ValueError(f"remembered_clients cannot be negative, and is {self.remembered_clients!r}")
        self._queues = ClientQueues(longest_prefix, self.patience)
        if not 0 <= self.newcomers < inf:
            raise ValueError(f"newcomers must be a number from 0 on, not {self.newcomers!r}")
        if not 0 <= self.borrow < inf:
            raise ValueError(f"borrow must be a number from 0 on, not {self.borrow!r}")
        self._new = Newcomers(self.newcomers, self.quantum)

    def arrive(self, job: Job) -> None:
        self._debtors.discard(job.client)
        self._creditors.pop(job.client, None)
        if job.client not in self._deficits:
            self._welcome(job.client)
        self._queues.put(job)
        if self._queues.head(job.client) is not self._heads.get(job.client):
            self._seat(job.client)

    def leave(self, job: Job) -> None:
        self._borrower = job if self.borrows(job.client) else None
        self._queues.leave(job)
        self._seat(job.client)

    def rematch(self, job: Job) -> None:
        self._queues.put(job)
        self._seat(job.client)

    def pick(self) -> Job | None:
        while (client := self._ready.first()) is None:
            held = [self._eligible_from(client) for client in self._passed_over()]
            due = self._parked.first_round()
            if due is None or any(eligible_from <= self._round for eligible_from in held):
                return None  # none waits, or only clients that are positive and held: no refill is due
            self._round = min(due, *held) if held else due
            self.refills += 1
            self._refill()
            self._forget()
        return self._heads[client]

    def reweigh(self, client: str) -> None:
        if (head := self._heads.get(client)) is not None:
            self._rank(client, head)  # it may borrow more now, or less

    def set_aside(self, test: Callable[[Job], bool]) -> Sequence[str]:
        heads = self._heads
        return self._ready.hide(lambda client: test(heads[client]))

    def release(self) -> None:
        self._ready.show()
        super().release()

    def runs(self, client: str, any_request: bool) -> None:
        if self.idle_first:
            (self._running.add if any_request else self._running.discard)(client)
            self._seat(client)

    def admitted(self, job: Job) -> None:
        account = self._account(job.client)
        self._new.admit(account, refilled=self._is_refilled(account))
        if job is self._borrower and self.borrow:
            own, _ = self._prices(job, job.cached_tokens)
            account.borrowed += own / self.weights.of(job.client)
            self._seat(job.client)

    def borrows(self, client: str) -> bool:
        return self._eligible_from(client) > self._round if client in self._deficits else False

    def charge(self, client: str, units: float) -> None:
        account = self._account(client)
        account.refilled = self._is_refilled(account)
        if account.borrowed and self._units(account) > 0:
            account.borrowed = 0.0
        left = self._units(account) + account.refund - units / self.weights.of(client)
        account.units = min(left, self.quantum)
        account.refund = left - account.units
        account.settled, account.charged = self._round, True
        self._new.charge(account, units)
        if (head := self._heads.get(client)) is not None:
            self._rank(client, head)

    def idle(self, client: str) -> None:
        if client in self._deficits and client not in self._queues:
            self._creditors.pop(client, None)
            if self._deficits[client].charged:
                self._debtors.put(client, (self._eligible_from(client), client))
            else:  # it was never served: forget it
                self._debtors.discard(client)
                self._drop(client)
        self._forget()

    def deficit(self, client: str) -> float:
        """The counter q of `client`, with the rounds that have passed; 0 for an unknown client."""
        account = self._deficits.get(client)
        return 0.0 if account is None else self._units(account)

    def counters(self) -> Mapping[str, float]:
        return {client: self._units(account) for client, account in self._deficits.items()}

    def counter(self, client: str) -> float | None:
        account = self._deficits.get(client)
        return None if account is None else self._units(account)

    def has_turns(self) -> bool:
        """False if every client that waits has used up its credit: the next `pick` refills them."""
        return len(self._ready) > 0 or any(
            self._eligible_from(client) <= self._round for client in self._passed_over()
        )

    def bound(self, input_units: float, output_units: float, weight: float = 1.0) -> float | None:
        """2·(U + Q^u) / min weight (Theorem 4.1). With a predictor w_q·M is added to U + Q^u, whatever it predicts, and
        with `borrow` Q^u."""
        charged_ahead = 0 if self.predictor is None else output_units
        credit = 2 * self.quantum if self.borrow else self.quantum
        return 2 * (input_units + output_units + charged_ahead + credit) / weight

    def owes(self, client: str) -> bool:
        return self.deficit(client) < 0

    def _account(self, client: str) -> Deficit:
        account = self._deficits.get(client)
        if account is None:
            account = self._deficits[client] = Deficit(settled=self._round)
        return account

    def _welcome(self, client: str) -> None:
        """Open the account of an unknown client."""
        account = self._account(client)
        if self._new.welcome(account, self.weights.of(client)):
            account.units = min(self.quantum, self._least_dropped)

    def _is_refilled(self, account: Deficit) -> bool:
        """Whether a round has paid a quantum to a client that had been charged."""
        due = account.charged and account.units <= 0
        return account.refilled or (due and account.settled < self._round)

    def _drop(self, client: str) -> Deficit:
        account = self._deficits.pop(client)
        self._new.forget(account)
        return account

    def _forget(self) -> None:
        """Move absent clients whose debt the rounds have paid to the creditors, and forget those beyond the limit."""
        while (client := self._debtors.first()) is not None and self._debtors.key(client)[0] <= self._round:
            self._debtors.discard(client)
            self._creditors[client] = None
        while len(self._creditors) > self.remembered_clients:
            client, _ = self._creditors.popitem(last=False)
            self._least_dropped = min(self._least_dropped, self._units(self._drop(client)))

    def _refill(self) -> None:
        """Those that waited for this round are ready, and of those that were only such as are set aside."""
        aside = self._ready.hidden
        for client in aside:
            self._parked.discard(client)
        self._ready = self._parked.take(self._round)
        self._ready.hidden = aside
        self._turns.update(dict.fromkeys(self._ready, True))
        for client in list(aside):
            self._seat(client)

    def _units(self, account: Deficit) -> float:
        """q after the rounds since it was settled: +Q^u in each round in which it is not positive."""
        if account.units > 0:
            return account.units
        return account.units + self.quantum * min(self._round - account.settled, self._rounds_due(account))

    def _rounds_due(self, account: Deficit) -> int:
        return 0 if account.units > 0 else floor(-account.units / self.quantum) + 1

    def _eligible_from(self, client: str) -> int:
        account = self._deficits[client]
        return account.settled + self._rounds_due(account)

    def _passed_over(self) -> list[str]:
        """Clients with a held job, or set aside."""
        return [*self._queues.held_clients(), *self._ready.hidden]

    def _may_borrow(self, account: Deficit, job: Job) -> bool:
        own, prefix = self._prices(job, job.prefix_tokens)
        borrowed = account.borrowed + own / self.weights.of(job.client)
        return job.prefix_tokens > 0 and own <= self.borrow * prefix and borrowed <= self.quantum

    def _prices(self, job: Job, cached_tokens: int) -> tuple[float, float]:
        """What `job` may be charged at most if so much of it is cached, and what that part would have cost."""
        own = self.cost(max(0, job.prompt_tokens - cached_tokens), job.max_output_tokens, cached_tokens)
        return own, self.cost(cached_tokens, 0)

    def _order(self, head: Job) -> Any:
        """Among clients with credit, the one whose first job has the smallest goes first."""
        return longest_prefix(head)

    def _seat(self, client: str) -> None:
        """Put `client` where `pick` looks for it: ready, parked until a round, or nowhere."""
        head = self._queues.head(client)
        if head is None:
            self._heads.pop(client, None)
            self._ready.discard(client)
            self._parked.discard(client)
            if client not in self._queues:
                self._turns.pop(client, None)
                self._ready.hidden.pop(client, None)
            return
        self._heads[client] = head
        self._rank(client, head)

    def _rank(self, client: str, head: Job) -> None:
        account = self._deficits[client]
        eligible_from = account.settled + self._rounds_due(account)
        is_new = self.newcomers_first and account.goes_first
        key = (not is_new, client in self._running, *self._order(head))
        if eligible_from <= self._round or (self.borrow and self._may_borrow(account, head)):
            if client not in self._ready:
                self._turns[client] = True
                self._parked.discard(client)
            self._ready.put(client, key)
        else:
            if client not in self._parked:
                self._turns[client] = False
                self._ready.discard(client)
            self._parked.put(client, eligible_from, key)
