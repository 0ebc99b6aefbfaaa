"""D2LPM that weighs saved prefill against queueing, in seconds, for the request itself and for all others.

Among the workers at which the client has credit (as in `d2lpm`), a request of L tokens, m_w of them cached at w, goes
to the worker where it adds least to the time that all requests spend in the cluster:

    cost_s(w) = a_w x (P_w + L - m_w) + b_w x D_w  +  _DELAYED x n_w x a_w x (L - m_w)

P_w and D_w are the tokens that w has still to prefill and to decode, n_w the requests in flight there, a_w its seconds
per prefilled token, b_w its seconds per decoded token. The first two terms are the request's own time, until all that
it has to wait for is done. The last is everybody else's: computing L - m_w tokens delays each request in flight at w
by that long, also those that decode, and as many more as arrive while these are served; hence _DELAYED = 2. So an
idle worker is used at once, even if it must compute a prefix again, because nobody is delayed there. Under overload,
where n_w is large, computing again what another worker holds costs more than almost any wait. A shorter match counts
for what it saves; there is no threshold.

The rates are measured. Of each served request, with P_w and n_w as they were when it was sent to w:

    a_w: time to first token over (P_w + its own tokens that were not cached)
    b_w: time per output token over n_w + 1, because the batch shares the engine

Each is a ratio of two sums with exponential decay (by `_FORGET` a sample), so requests with many tokens weigh more. It
starts from a guess that weighs like `_GUESS_SAMPLES` requests: the pace of all workers so far per unit of capacity, at
first `prefill_tokens_per_s` and `decode_tokens_per_s`. One sample is clipped to within a factor of `_FAR` of what is
known and to between `_FASTEST_S` and `_SLOWEST_S`, so a rate stays positive and finite whatever a gateway reports. If
nothing is ever measured, the guesses are used.

Unit of fairness and guarantee: those of `d2lpm`, whose proof does not depend on what load is. Trade-offs: work is taken
to be done in the order of arrival, which is not so where each replica is fair, so a_w is an average over clients; the
times include what lies between gateway and engine, which looks like slow prefill; what would be evicted to make room
is not counted. `docs/results.md`, beyond-tokens, compares it with the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.placement.contract import Ended, Request, WorkerView, least
from router.placement.d2lpm import Credited
from router.radix import Match

_FORGET = 0.02
_GUESS_SAMPLES = 5
_GUESS_TOKENS = 200
"""Tokens of one request of the guess."""
_FAR = 10.0
_FASTEST_S, _SLOWEST_S = 1e-8, 10.0
"""Bounds of what is believed, per token."""
_DELAYED = 2.0
"""How many requests added work delays for each in flight: itself, and one that arrives while it is served."""


class Pace:
    """Seconds per token, as a ratio of two decaying sums. Always positive and finite."""

    __slots__ = ("_seconds", "_tokens", "s_per_token")

    def __init__(self, s_per_token: float) -> None:
        self.s_per_token = s_per_token
        self._tokens = float(_GUESS_SAMPLES * _GUESS_TOKENS)
        self._seconds = s_per_token * self._tokens

    def learn(self, seconds: float, tokens: float) -> None:
        """`tokens` took `seconds`."""
        if not (math.isfinite(seconds) and tokens >= 1):
            return
        expected_s = tokens * self.s_per_token
        lowest_s = max(expected_s / _FAR, tokens * _FASTEST_S)
        highest_s = min(expected_s * _FAR, tokens * _SLOWEST_S)
        believed_s = min(max(seconds, lowest_s), highest_s)
        self._seconds += believed_s - _FORGET * self._seconds
        self._tokens += tokens - _FORGET * self._tokens
        self.s_per_token = self._seconds / self._tokens


@dataclass(slots=True)
class _Paces:
    """Of one worker, or of all workers per unit of capacity."""

    prefill: Pace
    decode: Pace
    capacity: float = 1.0


@dataclass(slots=True)
class _Sent:
    """The worker's work when a request was sent there: P_w with the request's own tokens, and n_w + 1."""

    prefill_tokens: float
    requests: float


@dataclass
class D2lpmTime(Credited):
    """The rates are first guesses, for a worker of capacity 1."""

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 1_000.0

    _all: _Paces = field(init=False, repr=False)
    _paces: dict[str, _Paces] = field(default_factory=dict, init=False, repr=False)
    _rates: dict[str, tuple[float, float, float]] = field(default_factory=dict, init=False, repr=False)
    """By worker: a_w, b_w, and how many requests added work delays per unit of load. Read for every decision."""
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False, repr=False)
    """By id of the request in flight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = self.prefill_tokens_per_s, self.decode_tokens_per_s
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"tokens per second must be positive and finite, not {rates[0]} and {rates[1]}")
        self._all = _Paces(Pace(1 / rates[0]), Pace(1 / rates[1]))

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """Of the workers at which the client has credit, the one where the request adds least."""
        available = self._credits.available(request.client, workers)
        chosen = least(available, self.costs_s(request, match, available))
        self._sent[request.id] = _Sent(
            chosen.prefill_tokens + request.input_tokens - match.of(chosen.name),
            chosen.load * chosen.capacity + 1,
        )
        return chosen.name

    def done(self, ended: Ended, now_s: float) -> None:
        """Charges as `d2lpm` does, and learns the worker's rates if the request was served."""
        super().done(ended, now_s)
        sent = self._sent.pop(ended.request.id, None)
        if sent is None or ended.outcome != "ok":
            return
        pace = self._paces[ended.worker]
        for prefill, decode, scale in (
            (pace.prefill, pace.decode, 1.0),
            (self._all.prefill, self._all.decode, pace.capacity),
        ):
            if ended.ttft_s is not None:
                prefill.learn(scale * ended.ttft_s, sent.prefill_tokens)
            if ended.tpot_s is not None:
                decode.learn(scale * ended.tpot_s * ended.output_tokens / sent.requests, ended.output_tokens)
        self._rate(ended.worker)

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """It starts at the pace of all workers, in proportion to its capacity."""
        super().worker_up(worker, capacity)
        self._paces[worker] = _Paces(
            Pace(self._all.prefill.s_per_token / capacity),
            Pace(self._all.decode.s_per_token / capacity),
            capacity,
        )
        self._rate(worker)

    def worker_changed(self, worker: str, capacity: float) -> None:
        """The measured rates stay; new samples correct them."""
        super().worker_changed(worker, capacity)
        self._paces[worker].capacity = capacity
        self._rate(worker)

    def worker_down(self, worker: str) -> None:
        """Drops its credits and its rates."""
        super().worker_down(worker)
        del self._paces[worker], self._rates[worker]

    def costs_s(self, request: Request, match: Match, workers: Sequence[WorkerView]) -> list[float]:
        """Seconds that `request` adds at each of `workers`: its own until it is prefilled, and the delay of others."""
        held, rates, tokens = match.lengths.get, self._rates, request.input_tokens
        return [
            (rate := rates[worker.name])[0]
            * (worker.prefill_tokens + (1.0 + rate[2] * worker.load) * (tokens - held(worker.name, 0)))
            + rate[1] * worker.decode_tokens
            for worker in workers
        ]

    def _rate(self, worker: str) -> None:
        """Stores what `costs_s` needs of `worker`."""
        pace = self._paces[worker]
        self._rates[worker] = (
            pace.prefill.s_per_token,
            pace.decode.s_per_token,
            _DELAYED * pace.capacity,
        )
