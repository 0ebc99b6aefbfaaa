"""What the running requests of one replica cost, and which client is charged for it.

    event                       books (ledger)                      policy (counters)
    begin: admitted             extend and cached tokens            charge, with the predicted output
    extend: a further chunk     extend tokens                       charge
    emit: output tokens         output tokens                       charge what was not predicted
    end                                                             give back what was predicted and not made
    retract: memory ran out     what is recomputed: the server's

The cost function, the predictor and the payers of shared prefixes are applied here and nowhere else, so a policy sees
units of service only. The account also keeps the extremes (longest prompt, most output owed) that the theorems'
bounds are made of.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.job import Job
from sglang_fair.core.largest import Extremes, Largest
from sglang_fair.core.ledger import SYSTEM, Ledger
from sglang_fair.core.payers import Payers, Swing
from sglang_fair.core.policy import Policy

ROUNDING = 1e-6
"""Tokens of which a sum of scaled ones may be off."""


@dataclass
class Account:
    """Charges `policy` and enters the `ledger`. Writes the served part of each `Job`."""

    policy: Policy
    cost: Cost = field(default_factory=Linear)
    payers: Payers | None = None
    """Splits the price of a prefix among the clients that share it. None: the client that computes it pays it all."""
    present: Container[str] = ()
    """Clients with a waiting or running request; kept by the queue. The policy may forget all others."""
    backlogs: Callable[[], tuple[int, int]] = lambda: (1, 0)
    """The numbers of the oldest backlog that lasts and of the latest that has begun; kept by the queue."""
    ledger: Ledger = field(default_factory=Ledger)
    running: dict[str, Job] = field(default_factory=dict, init=False)
    """The requests that are being served, by id."""

    largest: Largest = field(default_factory=Largest, init=False)

    _owed_tokens: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(int), init=False, repr=False
    )
    """Output that each client's running requests may still make, each times its scale."""
    _swing: Swing = field(default_factory=Swing, init=False, repr=False)
    _withheld: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float), init=False, repr=False
    )
    """Charges of running requests that are passed to the policy at their end (`Policy.charges_at_end`)."""
    _price: Cost = field(init=False, repr=False)
    """In whose units the policy counts service, before a request's scale."""

    def __post_init__(self) -> None:
        self._price = self.policy.price or self.cost

    # ---- the life of a running request

    def begin(
        self, job: Job, *, extend_tokens: int, cached_tokens: int, path: Sequence[Hashable] = ()
    ) -> None:
        """`job` was admitted: `extend_tokens` of its prompt are computed now, `cached_tokens` came from the cache.
        `path` names the blocks of its prompt (`payers.path_of`); needed only where clients share prices."""
        self.running[job.id] = job
        if not job.system:
            if self.policy.scales and not job.repeating:
                job.scale = self.policy.scale(job)
            owed = self._owed_tokens[job.client] = self._owed_tokens[job.client] + self._owed(job)
            found = Extremes(output_tokens=job.max_output_tokens * job.scale, owed_tokens=owed)
            self.largest.admitted(job.client, found, owes=self.policy.owes(job.client))
            if self.largest.is_due():
                self._settle_largest()
        job.path, job.reached_tokens = path, cached_tokens
        if job.repeating:
            self._find_again(job, cached_tokens)
            self._compute(job, extend_tokens)
            return
        job.cached_tokens += cached_tokens
        self.ledger.record(SYSTEM if job.system else job.client, cached=cached_tokens, requests=1)
        if job.system:
            self._compute(job, extend_tokens)
            return
        predictor, predicted = self.policy.predictor, 0
        if predictor is not None:
            predicted = min(job.max_output_tokens, max(0, round(predictor.predict(job))))
        self._share(job, cached_tokens)
        self._compute(job, extend_tokens, predicted)
        self.policy.admitted(job)

    def extend(self, job: Job, tokens: int) -> None:
        """The engine computes `tokens` more of the prompt."""
        self._compute(job, tokens)

    def emit(self, job: Job, tokens: int, *, unasked_tokens: int = 0) -> None:
        """The engine emitted `tokens` output tokens, and `unasked_tokens` behind the end of the answer. Those past the
        request's own limit are unasked as well (SGLang warms the cache for several samples with a token that it throws
        away). All of these are the server's work. ValueError if the request does not run."""
        if job.id not in self.running:
            raise ValueError(f"request {job.id} does not run")
        tokens = max(0, tokens)
        asked_for = 0 if job.system else min(tokens, max(0, job.max_output_tokens - job.output_tokens))
        unasked_tokens += tokens - asked_for
        if unasked_tokens > 0:
            job.unasked_tokens += unasked_tokens
            self.ledger.record(SYSTEM, output=unasked_tokens)
        if asked_for:
            self._charge(job, output=asked_for)
            self._owed_tokens[job.client] -= asked_for * job.scale

    def emit_each(self, jobs: Iterable[Job], tokens: int) -> None:
        """The same as `emit` for each of `jobs`; where an output token has one price, books and policy are updated once
        per client."""
        if tokens <= 0:
            return
        policy, price = self.policy, self._price
        if (
            not (isinstance(self.cost, Linear) and isinstance(price, Linear))
            or policy.predictor is not None
            or policy.charges_at_end
        ):
            for job in jobs:
                self.emit(job, tokens)
            return
        counts: defaultdict[str, int] = defaultdict(int)
        scaled: defaultdict[str, float] = defaultdict(float)
        for job in jobs:
            output = job.output_tokens + tokens
            if job.system or output > job.max_output_tokens:
                self.emit(job, tokens)
            else:
                job.output_tokens = output
                counts[job.client] += tokens
                if policy.scales:
                    scaled[job.client] += tokens * job.scale
        for client, count in counts.items():
            units = self.cost.output_weight * count
            self.ledger.record(client, output=count, service=units)
            if self.payers is not None:
                self._swing.charged(client, units)
            counted = scaled[client] if policy.scales else count
            policy.charge(client, price.output_weight * counted)
            self._owed_tokens[client] -= counted

    def retract(self, job: Job) -> None:
        """The engine took `job` back. What was computed of it will be computed again, at the server's expense; what was
        not, because it stopped between two chunks of its prompt, is its client's as before."""
        self._remove_running(job)
        job.retractions += 1
        job.repeating = True

    def end(self, job: Job) -> None:
        """`job` ended, by itself or by abort. What it got stays charged."""
        self._remove_running(job)
        self.settle(job)
        if not job.system:
            if units := self._withheld.pop(job.id, 0.0):
                self.policy.charge(job.client, units)
            self.policy.ended(job)

    def settle(self, job: Job) -> None:
        """Give back what was charged ahead for output that was not made, and let the predictor learn."""
        predictor = self.policy.predictor
        if predictor is None or job.system:
            return
        ahead = self._ahead(job)
        job.predicted_tokens = 0
        if ahead:
            self._charge_policy(job, -ahead)
        if job.max_output_tokens:
            predictor.observe(job)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights; later charges are divided by the new ones. What running requests were charged
        ahead is given back by the old weight and charged again by the new one."""
        own = self.policy.weights
        if own is None:
            return
        with self._charged_ahead_anew(weights):
            for client, weight in weights.items():
                own.set(client, weight)

    def tell_weight(self, client: str, weight: float, version: int) -> bool:
        """A request came with its client's `weight` (`Weights.tell`). Returns whether that changes it; then it is as
        after `set_weights`. O(1), and O(running requests) for a change where outputs are predicted."""
        own = self.policy.weights
        if own is None or not own.is_news(client, weight, version):
            return False
        with self._charged_ahead_anew((client,)):
            changed = own.tell(client, weight, version)
        if own.are_many:
            own.forget(lambda name: name in self.present or self.policy.owes(name))
        return changed

    # ---- what is read

    def bound(self) -> float | None:
        """The policy's guarantee for every interval since the start, by the largest prompt and owed output ever seen;
        None: it has none. Where prices are shared it holds for charged service, and includes how far transfers have
        moved a counter."""
        weights = self.policy.weights
        return self._bound(self.largest.ever, 1.0 if weights is None else weights.smallest_ever())

    def recent_bound(self) -> float | None:
        """The same for every interval that ends now: for two clients that wait now, since both began to. It knows the
        requests that still matter to such an interval (`largest`). Amortised O(1) for each admission."""
        if self.largest.is_cheap():
            self._settle_largest()
        weights = self.policy.weights
        return self._bound(self.largest.recent, 1.0 if weights is None else weights.smallest())

    @property
    def largest_input_tokens(self) -> int:
        """Most extend tokens of one request of late."""
        return self.largest.recent.input_tokens

    @property
    def largest_owed_tokens(self) -> int:
        """Most output tokens owed at once to one client's running requests of late, each times its scale."""
        return round(self.largest.recent.owed_tokens)

    # ---- inside

    def _compute(self, job: Job, tokens: int, predicted: int = 0) -> None:
        start, job.reached_tokens = job.reached_tokens, job.reached_tokens + tokens
        again = self._recomputed_tokens(job, start) if job.system or job.repeating else 0
        if again:
            self.ledger.record(SYSTEM, extend=again)
            if self.payers is not None:
                self.payers.lost(job.path, start, start + again)
        if job.system or (job.repeating and again == tokens):
            return
        units = self._charge(job, extend=tokens - again, predicted=predicted)
        if self.payers is not None:
            job.unpriced_units = self.payers.computed(
                job.client, job.path, start + again, job.reached_tokens, units, job.unpriced_units
            )
        input_units = self._price(job.extend_tokens, 0, job.cached_tokens)
        input_units = (input_units + self.policy.system_surcharge * job.system_extend_tokens) * job.scale
        prompt_tokens = (job.extend_tokens + job.cached_tokens) * job.scale
        self.largest.include(job.client, Extremes(job.extend_tokens, prompt_tokens, input_units))

    def _recomputed_tokens(self, job: Job, start: int) -> int:
        """How many of the tokens from `start` to `job.reached_tokens` are the server's: all of its own work, and of a
        retracted request all that it had before, with its own outputs, which follow the prompt then."""
        tokens = job.reached_tokens - start
        if job.system:
            return tokens
        first = max(start, job.extend_tokens + job.cached_tokens)
        return tokens - max(0, min(job.reached_tokens, job.prompt_tokens) - first)

    def _find_again(self, job: Job, cached_tokens: int) -> None:
        """A retracted request is admitted again. Of what it had not reached the cache may hold a part by now."""
        found = min(cached_tokens, job.prompt_tokens) - job.extend_tokens - job.cached_tokens
        if found > 0 and not job.system:
            self._charge(job, cached=found)

    def _share(self, job: Job, cached_tokens: int) -> None:
        """`job` hit the cache: its client takes over its part of the price from the clients that paid before."""
        if self.payers is None:
            return
        if not self.policy.borrows(job.client):
            self._swing.admitted(job.client)
        for client, units in self.payers.used(job.client, job.path, cached_tokens).items():
            self._swing.transferred(client, units)
            self.ledger.transfer(client, units)
            self.policy.charge(client, units)
            if client not in self.present:
                self.policy.idle(client)

    def _charge(
        self, job: Job, *, extend: int = 0, output: int = 0, predicted: int = 0, cached: int = 0
    ) -> float:
        """Enter what was served and return its cost. The policy is charged what this adds to its own count, so the sum
        of its charges is always the cost after the prediction, or after the output if that is longer."""
        cost, counted = self._units(job)
        job.extend_tokens += extend
        job.output_tokens += output
        job.predicted_tokens += predicted
        job.cached_tokens += cached
        cost_now, counted_now = self._units(job)
        served = cost_now - cost
        self.ledger.record(job.client, extend=extend, output=output, cached=cached, service=served)
        if self.payers is not None:
            self._swing.charged(job.client, served)
        self._charge_policy(job, counted_now - counted)
        return served

    def _units(self, job: Job) -> tuple[float, float]:
        """The cost of what `job` was served, and what the policy counts for it: with the output that is charged ahead,
        or by the policy's own prices; one that has these does not predict."""
        cost = self.cost(job.extend_tokens, job.output_tokens, job.cached_tokens)
        if self.policy.price is not None:
            units = self._price(job.extend_tokens, job.output_tokens, job.cached_tokens)
            return cost, units + self.policy.system_surcharge * job.system_extend_tokens
        if job.predicted_tokens > job.output_tokens:
            return cost, self.cost(job.extend_tokens, job.predicted_tokens, job.cached_tokens)
        return cost, cost

    def _ahead(self, job: Job) -> float:
        """Units charged for predicted output that is not made yet."""
        cost, counted = self._units(job)
        return counted - cost if job.predicted_tokens > job.output_tokens else 0.0

    @contextmanager
    def _charged_ahead_anew(self, clients: Container[str]) -> Iterator[None]:
        """Their weights change within."""
        ahead = []
        if self.policy.predictor is not None:
            mine = [job for job in self.running.values() if job.client in clients]
            ahead = [(job, units) for job in mine if (units := self._ahead(job))]
        for job, units in ahead:
            self._charge_policy(job, -units)
        yield
        for job, units in ahead:
            self._charge_policy(job, units)

    def _charge_policy(self, job: Job, units: float) -> None:
        if self.policy.charges_at_end:
            self._withheld[job.id] += units * job.scale
        else:
            self.policy.charge(job.client, units * job.scale)

    def _owed(self, job: Job) -> float:
        """Output that it may still make, times its scale."""
        return (job.max_output_tokens - job.output_tokens) * job.scale

    def _bound(self, largest: Extremes, weight: float) -> float | None:
        if self.payers is not None and not self.policy.keeps_bound_with_transfers:
            return None
        _, output_units = self._price.dearest(
            largest.prompt_tokens, largest.output_tokens, largest.owed_tokens
        )
        return self.policy.bound(largest.input_units + self._swing.most_units, output_units, weight)

    def _settle_largest(self) -> None:
        runs = {job.client for job in self.running.values() if not job.system}

        def matters(client: str) -> bool:
            return client in runs or self.policy.owes(client)

        anew = self.largest.settle(matters, *self.backlogs())
        if self.policy.weights is not None:
            self.policy.weights.settle(matters, anew)

    def _remove_running(self, job: Job) -> None:
        del self.running[job.id]
        if not job.system:
            client = job.client
            owed = self._owed_tokens[client] - self._owed(job)
            if owed > ROUNDING:
                self._owed_tokens[client] = owed
            else:
                del self._owed_tokens[client]
