"""What a replica has, holds and has been measured to do.

held      prompt and expected output of what is in flight there, and by how much answers are longer already
room      for tier 1 while that is below the KV cache; for tier 0 a prefill chunk more; and where running requests
          are taken back for urgent ones, what is due much later than a request in time does not count against it
beyond    a client of tier 0 that holds little is sent at once, until twice the KV cache is held: up to half of its
          part of the cache. The replica's policy puts it first. Ten thousand names have parts below any request
rate      tokens a second that became free while `FULL` of the KV cache was held, over `RATE_S`
prefill   prompt tokens a second: the most of a second in which prompts waited, halved in `HALVED_S` of such seconds
"""

from dataclasses import dataclass, field
from math import inf

from router.placement.contract import WorkerView
from router.placement.deadline.line import Job
from router.placement.window import Window

FULL, RATE_S, HALVED_S = 0.9, 10.0, 120.0
UNKNOWN_S = 20.0
"""Of an answer of which nothing is known."""


@dataclass(slots=True, eq=False)
class Replica(Window):
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
    flights: dict[str, Job] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    prefills: dict[str, float] = field(default_factory=dict)
    pulls: int = 0
    _full: tuple[float, float] | None = None
    """Since when it is full, and how many tokens had become free before."""
    _freed: float = 0.0
    _looked: tuple[float, int, float] | None = None
    """When prompts were looked at, how many tokens had been computed then, and waited."""

    @property
    def serves(self) -> str | None:
        """The model of which it is sent requests; None: of none."""
        return self.loaded if self.takes and self.target is None else None

    @property
    def held(self) -> float:
        return self.tokens + (0 if self.view is None else self.view.overrun_tokens)

    @property
    def is_full(self) -> bool:
        """Nothing has room, whatever comes, unless others are taken back."""
        return self.held >= self.kv_tokens + self.chunk_tokens

    @property
    def to_do_s(self) -> float:
        """About how long what it holds keeps it."""
        rate = self.rates.get(self.loaded or "", self.kv_tokens / UNKNOWN_S)
        return self.held / rate + self.prefill_s(0.0)

    def fits(self, one: Job, tier: int) -> bool:
        """Whether it may be sent there."""
        return self.has_room(None if tier or one.is_late else one.due_s, tier=tier)

    def prefill_s(self, prompt_tokens: float) -> float:
        """Until a prompt that is sent there is computed; 0 while that is not known."""
        pending = 0.0 if self.view is None else self.view.prefill_tokens
        return (pending + prompt_tokens) / self.prefills.get(self.loaded or "", inf)

    def send(self, one: Job, now_s: float) -> None:
        """It is in flight there."""
        self.flights[one.request.id] = one
        self.sent_s, self.empty_s, one.sent_s = now_s, None, now_s
        self.add(one.request.client, one.tokens, one.due_s)

    def land(self, name: str, now_s: float) -> Job:
        """It is over."""
        one = self.flights.pop(name)
        self._freed += one.tokens
        self.measure(now_s)
        self.remove(one.request.client, one.tokens, one.due_s)
        if not self.flights:
            self.empty_s = now_s
        return one

    def measure(self, now_s: float) -> None:
        """Learns rates from what it has done."""
        model, view = self.loaded, self.view
        if model is None or view is None:
            return
        if self.held < FULL * self.kv_tokens:
            self._full = None
        elif self._full is None:
            self._full = now_s, self._freed - view.overrun_tokens
        elif (took_s := now_s - self._full[0]) >= RATE_S:
            freed = self._freed - view.overrun_tokens
            if freed > self._full[1]:
                self.rates[model] = (freed - self._full[1]) / took_s
                self._full = now_s, freed
        if self._looked is not None and (took_s := now_s - self._looked[0]) < 1.0:
            return
        if self._looked is not None and self._looked[2] and view.prefill_tokens:
            known = self.prefills.get(model, 0.0) * 0.5 ** (min(took_s, 10.0) / HALVED_S)
            if (tokens := view.prefilled_tokens - self._looked[1]) > 0:
                self.prefills[model] = max(known, tokens / took_s)
        self._looked = now_s, view.prefilled_tokens, view.prefill_tokens

    def has(self, model: str | None, now_s: float) -> None:
        """It serves this model from here on, None: none. Nothing is in flight there."""
        if model is not None:
            self.target, self.is_urgent, self.since_s = None, False, now_s
        self.loaded, self.empty_s, self.sent_s = model, now_s, -inf
        self._full = self._looked = None
