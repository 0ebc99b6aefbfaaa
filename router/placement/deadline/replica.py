"""What a replica has, holds and has been measured to do.

held      prompt and expected output of what is in flight there, and by how much answers are longer already
room      for tier 1 while that is below the KV cache; for tier 0 a prefill chunk more; and where running requests
          are taken back for urgent ones, what is due `LATER_S` after a request in time does not count against it
beyond    a client of tier 0 that holds little is sent at once, until twice the KV cache is held: up to half of its
          part of the cache. The replica's policy puts it first. Ten thousand names have parts below any request
rate      tokens a second that became free while `FULL` of the KV cache was held, over `RATE_S`
prefill   prompt tokens a second: the most of a second in which prompts waited, halved in `HALVED_S` of such seconds
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from router.placement.contract import Request, WorkerView
from router.placement.deadline.line import Waiting
from router.placement.window import InFlight

LATER_S, DUE_S = 120.0, 10.0
FULL, RATE_S, HALVED_S = 0.9, 10.0, 120.0
RETRY_S, LONGEST_RETRY_S = 3.0, 400.0
"""A little more than `router.swaps` has, so that what is ordered is done."""
LATE_PULLS = 8
"""Of so many pulls one looks at the hopeless first."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request that was sent."""

    request: Request
    tokens: float
    due: int
    """In steps of `DUE_S`."""
    slo_s: float
    sent_s: float
    tier: int


@dataclass(slots=True, eq=False)
class Replica:
    """`swap_s`: the models that it can load, each with the seconds that it takes; empty: it keeps its own."""

    name: str
    kv_tokens: int
    chunk_tokens: int
    loaded: str | None = None
    swap_s: Mapping[str, float] = field(default_factory=dict)
    takes: bool = True
    view: WorkerView | None = None
    target: str | None = None
    """The model that it is to have next."""
    is_urgent: bool = False
    """It begins to load that at once, and not when what runs has ended."""
    ready_s: float = 0.0
    """When it is expected to serve its target."""
    since_s: float = -inf
    """When it got its model."""
    empty_s: float | None = 0.0
    """Since when nothing is in flight there; None: something is."""
    sent_s: float = -inf
    flights: dict[str, Flight] = field(default_factory=dict)
    sent: InFlight = field(default_factory=InFlight)
    rates: dict[str, float] = field(default_factory=dict)
    prefills: dict[str, float] = field(default_factory=dict)
    pulls: int = 0
    failures: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By model that it could not load, how often in a row, and from when on it is tried again."""
    _full: tuple[float, float] | None = None
    """Since when it is full, and how many tokens had become free before."""
    _freed: float = 0.0
    _looked: tuple[float, int, int] | None = None
    """When prompts were looked at, how many tokens had been computed then, and waited."""

    @property
    def serves(self) -> str | None:
        """The model of which it is sent requests; None: of none."""
        return self.loaded if self.takes and self.target is None else None

    @property
    def held(self) -> float:
        """Tokens."""
        return self.sent.tokens + (0 if self.view is None else self.view.overrun_tokens)

    @property
    def pending_tokens(self) -> float:
        """Of prompts that were sent and have no first token yet."""
        return 0.0 if self.view is None else self.view.prefill_tokens

    @property
    def is_full(self) -> bool:
        """Nobody has room, whoever comes, unless others are taken back."""
        return self.held >= self.kv_tokens + self.chunk_tokens

    def can_load(self, model: str, now_s: float) -> bool:
        """Whether it may be given this model now."""
        return model in self.swap_s and now_s >= self.failures.get(model, (0, 0.0))[1]

    def has_room(self, one: Waiting, *, evicts: bool) -> bool:
        """Whether it may be sent there."""
        held = self.held
        if held < self.kv_tokens + (0 if one.tier else self.chunk_tokens):
            return True
        if not evicts or one.tier or one.is_late:
            return False
        return held - self.sent.due_from((one.due_s + LATER_S) / DUE_S) < self.kv_tokens

    def is_small(self, client: str, tokens: float) -> bool:
        """Whether a client holds so little there that it need not wait for those that hold much. O(1)."""
        return self.sent.is_small(client, tokens, self.kv_tokens) and self.held < 2 * self.kv_tokens

    def prefill_s(self, prompt_tokens: float) -> float:
        """Until a prompt that is sent there is computed; 0 while that is not known."""
        rate = self.prefills.get(self.loaded or "", inf)
        return (self.pending_tokens + prompt_tokens) / rate

    def send(self, flight: Flight) -> None:
        """A request is in flight there. Nothing happens if it is already."""
        request = flight.request
        if request.id in self.flights:
            return
        self.flights[request.id] = flight
        self.sent_s, self.empty_s = flight.sent_s, None
        self.sent.add(request.client, flight.tokens, flight.due)

    def land(self, name: str, now_s: float) -> Flight | None:
        """It is over; None: it was not here."""
        flight = self.flights.pop(name, None)
        if flight is None:
            return None
        self._freed += flight.tokens
        self.measure(now_s)
        self.sent.remove(flight.request.client, flight.tokens, flight.due)
        if not self.flights:
            self.empty_s = now_s
            self.sent.clear()
        return flight

    def measure(self, now_s: float) -> None:
        """Learns rates from what it has done."""
        model = self.loaded
        if model is None or self.view is None:
            return
        if self.held < FULL * self.kv_tokens:
            self._full = None
        elif self._full is None:
            self._full = now_s, self._freed - self.view.overrun_tokens
        elif (took_s := now_s - self._full[0]) >= RATE_S:
            freed = self._freed - self.view.overrun_tokens
            if freed > self._full[1]:
                self.rates[model] = (freed - self._full[1]) / took_s
                self._full = now_s, freed
        done, waits = self.view.prefilled_tokens, self.pending_tokens
        if self._looked is None or now_s - self._looked[0] >= 1.0:
            if self._looked is not None and self._looked[2] and waits:
                took_s, tokens = now_s - self._looked[0], done - self._looked[1]
                known = self.prefills.get(model, 0.0) * 0.5 ** (min(took_s, 10.0) / HALVED_S)
                if tokens > 0:
                    self.prefills[model] = max(known, tokens / took_s)
            self._looked = now_s, done, int(waits)

    def has(self, model: str | None, now_s: float) -> None:
        """It serves this model from here on, None: none. Nothing is in flight there."""
        for name in list(self.flights):
            self.land(name, now_s)
        if model is not None:
            if self.target not in (None, model):
                count, _ = self.failures.get(self.target, (0, 0.0))
                wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0**count)
                self.failures[self.target] = count + 1, now_s + wait_s
            else:
                self.failures.pop(model, None)
            self.target, self.is_urgent, self.since_s = None, False, now_s
        self.loaded, self.empty_s, self.sent_s = model, now_s, -inf
        self._full = self._looked = None
