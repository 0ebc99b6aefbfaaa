"""D2LPM that weighs saved prefill against queueing, both in seconds.

Among the workers at which the client has credit (as in `d2lpm`), a request of L tokens, m_w of them cached at w,
goes to the one that would have all it is asked for done first:

    cost_s(w) = a_w x (P_w + L - m_w) + b_w x D_w

P_w and D_w are the tokens that w has still to prefill and to decode, a_w its seconds per prefilled token, b_w
its seconds per decoded token. So a prefix is left as soon as queueing for it costs the request more than computing
it elsewhere, and a shorter match at an idle worker counts for what it saves: no threshold.

The rates are measured. Of each request that was served, with P_w and the number n of requests at w as they were
when it was sent there:

    a_w: time to first token over (P_w + its own tokens that were not cached)
    b_w: time per output token over n + 1, because the batch shares the engine

Each is a ratio of two sums that forget (by `_FORGET` a sample), so many tokens weigh more than few, and it
starts from a guess that weighs like `_GUESS_SAMPLES` such requests: the pace of all workers so far per unit of
capacity, and in the beginning `prefill_tokens_per_s` and `decode_tokens_per_s`. One sample is believed within
a factor of `_FAR` of what is known and within `_FASTEST_S` and `_SLOWEST_S`, whatever a gateway reports, so a rate
stays positive and finite. If nothing
is ever measured the guesses are used.

Unit of fairness and guarantee: those of `d2lpm`. Trade-offs: requests of a program that come together are scattered,
because where the first of them went its prefix still waits to be computed, and computing it elsewhere looks as
quick; what that costs everybody else is not weighed. With questions that come eight at a time it is round robin
(`docs/results.md`, beyond-tokens). The times include what lies between gateway and engine, which looks like slow
prefill; work done is taken to be in the order of arrival.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.placement.contract import Ended, Request, WorkerView, least
from router.placement.d2lpm import D2lpm
from router.radix import Match

_FORGET = 0.02
_GUESS_SAMPLES = 5
_GUESS_TOKENS = 200
"""Tokens of one such request."""
_FAR = 10.0
_FASTEST_S, _SLOWEST_S = 1e-8, 10.0
"""Per token: whatever is measured lies between."""


class Pace:
    """Seconds per token, as a ratio of sums that forget. Positive and finite whatever it is told."""

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
    """A worker's, or those of all per unit of capacity."""

    prefill: Pace
    decode: Pace
    capacity: float = 1.0


@dataclass(slots=True)
class _Sent:
    """What stood before a request at the worker that it was sent to: P_w with its own tokens, and n + 1."""

    prefill_tokens: float
    requests: float


@dataclass
class D2lpmTime(D2lpm):
    """The rates are first guesses, for a worker of capacity 1."""

    prefill_tokens_per_s: float = 10_000.0
    decode_tokens_per_s: float = 1_000.0

    _all: _Paces = field(init=False, repr=False)
    _paces: dict[str, _Paces] = field(default_factory=dict, init=False, repr=False)
    _sent: dict[str, _Sent] = field(default_factory=dict, init=False, repr=False)
    """By request in flight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rates = self.prefill_tokens_per_s, self.decode_tokens_per_s
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError(f"tokens per second must be positive and finite, not {rates[0]} and {rates[1]}")
        self._all = _Paces(Pace(1 / rates[0]), Pace(1 / rates[1]))

    def done(self, ended: Ended, now_s: float) -> None:
        """Charges as `d2lpm` does, and learns the worker's rates from a request that was served."""
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

    def worker_up(self, worker: str, capacity: float = 1.0) -> None:
        """Starts at the pace of all, for its capacity."""
        super().worker_up(worker, capacity)
        self._paces[worker] = _Paces(
            Pace(self._all.prefill.s_per_token / capacity),
            Pace(self._all.decode.s_per_token / capacity),
            capacity,
        )

    def worker_changed(self, worker: str, capacity: float) -> None:
        """What was measured stands; new times correct it."""
        super().worker_changed(worker, capacity)
        self._paces[worker].capacity = capacity

    def worker_down(self, worker: str) -> None:
        """Its credits and its pace go with it."""
        super().worker_down(worker)
        del self._paces[worker]

    def costs_s(self, request: Request, match: Match, workers: Sequence[WorkerView]) -> list[float]:
        """Seconds until each of `workers` would have done what it has to and prefilled `request`."""
        held, paces, tokens = match.lengths, self._paces, request.input_tokens
        return [
            (pace := paces[worker.name]).prefill.s_per_token
            * (worker.prefill_tokens + tokens - held.get(worker.name, 0))
            + pace.decode.s_per_token * worker.decode_tokens
            for worker in workers
        ]

    def _choose(self, request: Request, match: Match, available: Sequence[WorkerView]) -> str:
        chosen = least(available, self.costs_s(request, match, available))
        self._sent[request.id] = _Sent(
            chosen.prefill_tokens + request.input_tokens - match.of(chosen.name),
            chosen.load * chosen.capacity + 1,
        )
        return chosen.name
