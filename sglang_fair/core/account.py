"""What the running requests of one replica cost, and whom it is charged to.

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
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM, Ledger
from sglang_fair.core.payers import Payers, Swing
from sglang_fair.core.policy import Policy


@dataclass
class Account:
    """Charges `policy` and enters the `ledger`. Writes the served part of each `Job`."""

    policy: Policy
    cost: Cost = field(default_factory=Linear)
    payers: Payers | None = None
    """Splits the price of a prefix among the clients that share it. None: whoever computes it pays it all."""
    present: Container[str] = ()
    """Clients with a waiting or running request; kept by the queue. The policy may forget all others."""
    ledger: Ledger = field(default_factory=Ledger)
    running: dict[str, Job] = field(default_factory=dict, init=False)
    """The requests that are being served, by id."""

    largest_input_tokens: int = field(default=0, init=False)
    """Most extend tokens charged to one request: L_input of the theorems, as seen so far."""
    largest_prompt_tokens: int = field(default=0, init=False)
    """Most extend and cached tokens of one request. A cost may depend on a token's position in the prompt."""
    dearest_input_units: float = field(default=0.0, init=False)
    """Cost of the dearest prompt."""
    largest_output_tokens: int = field(default=0, init=False)
    """Largest output limit of one request."""
    largest_owed_tokens: int = field(default=0, init=False)
    """Most output tokens owed at once to one client's running requests: M of the theorems, as seen so far."""

    _owed_tokens: defaultdict[str, int] = field(
        default_factory=lambda: defaultdict(int), init=False, repr=False
    )
    """Output that each client's running requests may still make."""
    _swing: Swing = field(default_factory=Swing, init=False, repr=False)

    # ---- the life of a running request

    def begin(
        self, job: Job, *, extend_tokens: int, cached_tokens: int, path: Sequence[Hashable] = ()
    ) -> None:
        """`job` was admitted: `extend_tokens` of its prompt are computed now, `cached_tokens` came from the cache.

        `path` names the blocks of its prompt (`payers.path_of`); needed only where clients share prices.
        """
        self.running[job.id] = job
        if not job.system:
            owed = self._owed_tokens[job.client] = (
                self._owed_tokens[job.client] + job.max_output_tokens - job.output_tokens
            )
            self.largest_output_tokens = max(self.largest_output_tokens, job.max_output_tokens)
            self.largest_owed_tokens = max(self.largest_owed_tokens, owed)
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
        predicted = self._predict(job)
        self._share(job, cached_tokens)
        self._compute(job, extend_tokens, predicted)
        self.policy.admitted(job, self.dearest_input_units, self._dearest_output_units())

    def extend(self, job: Job, tokens: int) -> None:
        """The engine computes `tokens` more of the prompt."""
        self._compute(job, tokens)

    def emit(self, job: Job, tokens: int, *, unasked_tokens: int = 0) -> None:
        """The engine emitted `tokens` output tokens, and `unasked_tokens` behind the end of the answer.

        Tokens past the request's own limit are unasked as well: SGLang runs the prompt of a request for several
        samples once ahead of them, to warm the cache, and throws away the one token that comes out. All of these are
        the server's work. ValueError if the request does not run.
        """
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
            self._owed_tokens[job.client] -= asked_for

    def emit_each(self, jobs: Iterable[Job], tokens: int) -> None:
        """Each of `jobs`, all running, emitted `tokens` output tokens.

        The same as `emit` for one after the other; where an output token has one price, books and policy are updated
        once per client.
        """
        if tokens <= 0:
            return
        if not isinstance(self.cost, Linear) or self.policy.predictor is not None:
            for job in jobs:
                self.emit(job, tokens)
            return
        counts: defaultdict[str, int] = defaultdict(int)
        for job in jobs:
            output = job.output_tokens + tokens
            if job.system or output > job.max_output_tokens:
                self.emit(job, tokens)
            else:
                job.output_tokens = output
                counts[job.client] += tokens
        for client, count in counts.items():
            units = self.cost.output_weight * count
            self.ledger.record(client, output=count, service=units)
            self._swing.charged(client, units)
            self.policy.charge(client, units)
            self._owed_tokens[client] -= count

    def retract(self, job: Job) -> None:
        """The engine took `job` back. What was computed of it will be computed again, at the server's expense; what was
        not, because it stopped between two chunks of its prompt, is its client's as before."""
        self._stop(job)
        job.retractions += 1
        job.repeating = True

    def end(self, job: Job) -> None:
        """`job` ended, by itself or by abort. What it got stays charged."""
        self._stop(job)
        self.settle(job)

    def settle(self, job: Job) -> None:
        """Give back what was charged ahead for output that was not made, and let the predictor learn."""
        predictor = self.policy.predictor
        if predictor is None or job.system:
            return
        unused = self._ahead(job)
        job.predicted_tokens = 0
        self._charge_ahead(job, -unused)
        if job.max_output_tokens:
            predictor.observe(job)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change clients' weights; later charges are divided by the new ones. What running requests were charged
        ahead is given back by the old weight and charged again by the new one."""
        own = self.policy.weights
        if own is None:
            return
        ahead = [(job, self._ahead(job)) for job in self.running.values() if job.client in weights]
        for job, units in ahead:
            self._charge_ahead(job, -units)
        for client, weight in weights.items():
            own.set(client, weight)
        for job, units in ahead:
            self._charge_ahead(job, units)

    # ---- what people read

    def bound(self) -> float | None:
        """The policy's guarantee, with the largest prompt and the largest owed output seen so far. None: it has none.

        Where prices are shared it holds for charged service, and includes how far transfers have moved a counter.
        """
        if self.payers is not None and not self.policy.keeps_bound_with_transfers:
            return None
        input_units = self.dearest_input_units + self._swing.most_units
        return self.policy.bound(input_units, self._dearest_output_units())

    # ---- inside

    def _compute(self, job: Job, tokens: int, predicted: int = 0) -> None:
        start, job.reached_tokens = job.reached_tokens, job.reached_tokens + tokens
        again = self._again(job, start)
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
        self.largest_input_tokens = max(self.largest_input_tokens, job.extend_tokens)
        self.largest_prompt_tokens = max(self.largest_prompt_tokens, job.extend_tokens + job.cached_tokens)
        input_units = self.cost(job.extend_tokens, 0, job.cached_tokens)
        self.dearest_input_units = max(self.dearest_input_units, input_units)

    def _again(self, job: Job, start: int) -> int:
        """How many of the tokens from `start` to `job.reached_tokens` are the server's: all of its own work, and of a
        retracted request all that it had before. Its own outputs, which follow the prompt then, are among those."""
        tokens = job.reached_tokens - start
        if job.system or not job.repeating:
            return tokens if job.system else 0
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
        """Enter what was served and return its cost. The policy is charged that, corrected by what the predicted
        output changes: the sum of its charges is always the cost after the prediction, or after the output if that
        is longer."""
        cost, ahead = self._cost(job), self._ahead(job)
        job.extend_tokens += extend
        job.output_tokens += output
        job.predicted_tokens += predicted
        job.cached_tokens += cached
        served = self._cost(job) - cost
        self.ledger.record(job.client, extend=extend, output=output, cached=cached, service=served)
        self._swing.charged(job.client, served)
        self.policy.charge(job.client, served + self._ahead(job) - ahead)
        return served

    def _charge_ahead(self, job: Job, units: float) -> None:
        if units:
            self.policy.charge(job.client, units)

    def _predict(self, job: Job) -> int:
        """Output tokens to charge at admission: none without a predictor."""
        predictor = self.policy.predictor
        if predictor is None:
            return 0
        return min(job.max_output_tokens, max(0, round(predictor.predict(job))))

    def _cost(self, job: Job) -> float:
        return self.cost(job.extend_tokens, job.output_tokens, job.cached_tokens)

    def _ahead(self, job: Job) -> float:
        """Units charged for predicted output that is not made yet."""
        if job.predicted_tokens <= job.output_tokens:
            return 0.0
        return self.cost(job.extend_tokens, job.predicted_tokens, job.cached_tokens) - self._cost(job)

    def _dearest_output_units(self) -> float:
        _, output_units = self.cost.dearest(
            self.largest_prompt_tokens, self.largest_output_tokens, self.largest_owed_tokens
        )
        return output_units

    def _stop(self, job: Job) -> None:
        del self.running[job.id]
        if not job.system:
            client = job.client
            owed = self._owed_tokens[client] - (job.max_output_tokens - job.output_tokens)
            if owed:
                self._owed_tokens[client] = owed
            else:
                del self._owed_tokens[client]
