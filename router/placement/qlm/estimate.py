"""How long a request waits, and how long a group keeps a worker (QLM, section 5; the request waiting time estimator).

    wait    a · (uncached prompt tokens ahead) + b · (expected output tokens ahead) + z · b · √(variance of those)
            ahead: of those that wait in front. If all of them fit into free memory it is 0; if not, the outputs of as
            many as fit there do not count: they still write when its turn comes
    drain   a · (uncached prompt tokens) + b · (expected output tokens) of a group
    tail    how long the last of a group still writes when all of it has begun: the 99th percentile of its model's
            outputs at the measured time per token. A switch to another model waits for that

a and b are measured for each worker and model while requests wait there, so batches are full: recursive least squares
of seconds = a · prompt + b · output over records of some seconds each, weighted by one over the seconds that each was
expected to take. Older records fade by half in `_HALF_LIFE_S` seconds of work. A record is believed within a factor
`_FAR` of what was expected, so a pause of a minute counts as a slow step; several in a row beyond it on the same side
are no noise: then all earlier ones are forgotten. Both rates stay positive, whatever is reported. With z = 2.33 the
wait is exceeded once in a hundred times, if lengths are independent; `mean_s` is the one to compare with what happened.

With `literal` Eq. 1-5 of the paper hold: wait = outputs ahead / throughput, throughput as measured in output tokens a
second, nothing is free, and an answer takes as long as the longest possible one.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, log2, sqrt
from typing import NamedTuple

from router.placement.qlm.groups import Group

ONE_IN_A_HUNDRED = 2.33
"""z of the standard normal distribution."""

LEAST_S = 2.0
"""Of a record."""
_HALF_LIFE_S = 120.0
_KEPT = 0.01
"""Of all records, what the last estimate weighs."""
_FAR = 3.0
_DOUBTS, _DOUBTED_S = 3, 1.0
"""So many records in a row beyond `_FAR`, of so many seconds, are believed."""
_LEAST_S, _MOST_S = 1e-9, 10.0
"""Bounds of both rates, per token."""

PREDICTIONS = 1_000
"""The last ones, of which R² is."""
ENOUGH = 20
"""Samples below which there is no R², and no quantile of outputs."""


class Rates:
    """Seconds per uncached prompt token (a) and per output token (b) of one worker with full batches."""

    __slots__ = ("_doubted_s", "_doubts", "_gram", "_seconds", "_sums", "_tokens", "output_s", "prompt_s")

    def __init__(self, prompt_s: float, output_s: float) -> None:
        self.prompt_s, self.output_s = _bounded(prompt_s), _bounded(output_s)
        self._gram, self._sums = (0.0, 0.0, 0.0), (0.0, 0.0)
        """Weighted sums of prompt², prompt · output, output²; of seconds · prompt, seconds · output."""
        self._seconds = self._tokens = 0.0
        """Decayed, all told; of output tokens."""
        self._doubts, self._doubted_s = 0, 0.0
        """Records in a row that took longer than is believed, or if negative shorter; and their seconds."""

    @property
    def throughput(self) -> float:
        """Output tokens a second, all told: Θ of Eq. 2."""
        return max(self._tokens / self._seconds, 1 / _MOST_S) if self._tokens else 1 / self.output_s

    def learn(self, seconds: float, prompt_tokens: float, output_tokens: float) -> None:
        """A record. One that cannot be is ignored."""
        if not (isfinite(seconds) and seconds > 0 and isfinite(prompt_tokens) and isfinite(output_tokens)):
            return
        if prompt_tokens < 0 or output_tokens < 0 or prompt_tokens + output_tokens < 1:
            return
        expected_s = self.prompt_s * prompt_tokens + self.output_s * output_tokens
        believed_s = min(max(seconds, expected_s / _FAR), expected_s * _FAR)
        self._doubt(seconds, believed_s)
        fade = 0.5 ** (believed_s / _HALF_LIFE_S)
        self._seconds = fade * self._seconds + believed_s
        self._tokens = fade * self._tokens + output_tokens
        prompt, output = prompt_tokens / expected_s, output_tokens / expected_s
        self._gram = (
            fade * self._gram[0] + prompt * prompt_tokens,
            fade * self._gram[1] + prompt * output_tokens,
            fade * self._gram[2] + output * output_tokens,
        )
        self._sums = fade * self._sums[0] + prompt * believed_s, fade * self._sums[1] + output * believed_s
        self._solve()

    def _doubt(self, seconds: float, believed_s: float) -> None:
        """Forget everything if this is one of several that cannot be noise."""
        side = (seconds > believed_s) - (seconds < believed_s)
        if not side or side * self._doubts < 0:
            self._doubts, self._doubted_s = 0, 0.0
        self._doubts += side
        self._doubted_s += seconds
        if abs(self._doubts) >= _DOUBTS and self._doubted_s >= _DOUBTED_S:
            self._gram, self._sums = (0.0, 0.0, 0.0), (0.0, 0.0)
            self._seconds = self._tokens = 0.0

    def _solve(self) -> None:
        """Least squares, with the last estimate as a small part of the records."""
        prompts, both, outputs = self._gram[0] * (1 + _KEPT), self._gram[1], self._gram[2] * (1 + _KEPT)
        by_prompt = self._sums[0] + _KEPT * self._gram[0] * self.prompt_s
        by_output = self._sums[1] + _KEPT * self._gram[2] * self.output_s
        prompt_s, output_s = self.prompt_s, self.output_s
        determinant = prompts * outputs - both * both
        if determinant > 0:
            prompt_s = (by_prompt * outputs - by_output * both) / determinant
            output_s = (by_output * prompts - by_prompt * both) / determinant
        if determinant <= 0 or not self._is_near(prompt_s, self.prompt_s):
            prompt_s = self._near(prompt_s, self.prompt_s)
            output_s = (by_output - both * prompt_s) / outputs if outputs > 0 else self.output_s
        if determinant <= 0 or not self._is_near(output_s, self.output_s):
            output_s = self._near(output_s, self.output_s)
            prompt_s = (by_prompt - both * output_s) / prompts if prompts > 0 else self.prompt_s
        self.prompt_s = _bounded(self._near(prompt_s, self.prompt_s))
        self.output_s = _bounded(self._near(output_s, self.output_s))

    @staticmethod
    def _near(rate_s: float, last_s: float) -> float:
        return min(max(rate_s, last_s / _FAR), last_s * _FAR)

    def _is_near(self, rate_s: float, last_s: float) -> bool:
        return last_s / _FAR <= rate_s <= last_s * _FAR


class Outputs:
    """How long a model's answers are: counts in buckets a quarter of a power of two wide, of which older ones fade."""

    _FADE = 0.999

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._unit = 1.0
        self.longest = 1

    def learn(self, tokens: int) -> None:
        """An answer is complete."""
        bucket = int(4 * log2(max(1, tokens)))
        self._unit /= self._FADE
        self._counts[bucket] = self._counts.get(bucket, 0.0) + self._unit
        self.longest = max(self.longest, tokens)
        if self._unit > 1e12:
            self._counts = {at: count / self._unit for at, count in self._counts.items()}
            self._unit = 1.0

    def quantile(self, part: float) -> float | None:
        """Tokens that this part of the answers does not exceed, rounded up to the bucket's end; None until there are
        `ENOUGH` answers."""
        total = sum(self._counts.values())
        if total < ENOUGH * self._unit * self._FADE**ENOUGH:
            return None
        reached = 0.0
        for bucket in sorted(self._counts):
            reached += self._counts[bucket]
            if reached >= part * total:
                return min(2 ** ((bucket + 1) / 4), self.longest)
        return float(self.longest)


class Ahead(NamedTuple):
    """What is in front of a request: sums over those that wait there."""

    prompt_tokens: float = 0.0
    """Not cached."""
    output_tokens: float = 0.0
    output_variance: float = 0.0

    def plus(self, group: Group) -> "Ahead":
        """With a group that waits."""
        return Ahead(
            self.prompt_tokens + group.prompt_tokens,
            self.output_tokens + group.output_tokens,
            self.output_variance + group.output_variance,
        )

    def beyond(self, free_tokens: float, own_tokens: float) -> "Ahead":
        """What a request waits for that needs `own_tokens` of memory: nothing if it fits with those in front. Else all
        their prompts, but not the outputs of as many as fit, which still write when its turn comes."""
        need = self.prompt_tokens + self.output_tokens
        if need + own_tokens <= free_tokens or not need:
            return Ahead()
        part = max(0.0, 1 - max(0.0, free_tokens) / need)
        return Ahead(self.prompt_tokens, part * self.output_tokens, part * self.output_variance)


class Wait(NamedTuple):
    """How long until a request is begun: expected, and with what is allowed for chance."""

    mean_s: float
    likely_s: float


class Pace(NamedTuple):
    """Of a worker with a model: seconds per uncached prompt token and output token of a group's drain, and its tail."""

    prompt_s: float
    output_s: float
    tail_s: float


@dataclass(slots=True)
class _Measured:
    rates: Rates
    token_s: float
    """Per output token of one request: d · ε of Eq. 4."""


@dataclass
class Estimator:
    """Estimates for all workers and models. The first three are guesses, for what was never measured anywhere."""

    prompt_s: float = 1e-4
    output_s: float = 1e-3
    token_s: float = 0.03
    longest_tokens: int = 2_048
    """Of an answer, until outputs were measured; with `literal` always."""
    literal: bool = False
    z: float = ONE_IN_A_HUNDRED

    _measured: dict[tuple[str, str], _Measured] = field(default_factory=dict, init=False, repr=False)
    _latest: dict[str, _Measured] = field(default_factory=dict, init=False, repr=False)
    """By model, the one that learnt last: where another worker starts."""
    _outputs: dict[str, Outputs] = field(default_factory=dict, init=False, repr=False)
    _marks: dict[str, tuple[float, int, int]] = field(default_factory=dict, init=False, repr=False)
    """By worker that is full, since when, and what it had done by then."""
    _predicted: OrderedDict[str, float] = field(default_factory=OrderedDict, init=False, repr=False)
    _compared: deque[tuple[float, float]] = field(
        default_factory=lambda: deque(maxlen=PREDICTIONS), init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not all(
            0 < one < inf for one in (self.prompt_s, self.output_s, self.token_s, self.longest_tokens)
        ):
            raise ValueError("first guesses of an estimator are positive numbers")

    # -- what is measured

    def learn(
        self, worker: str, model: str, seconds: float, prompt_tokens: float, output_tokens: float
    ) -> None:
        """A record of a worker with full batches: what it did in so many seconds."""
        measured = self._of(worker, model)
        measured.rates.learn(seconds, prompt_tokens, output_tokens)
        self._latest[model] = measured

    def learn_answer(self, worker: str, model: str, output_tokens: int, token_s: float | None) -> None:
        """An answer is complete: its length, and its seconds per token if they are known."""
        measured = self._of(worker, model)
        outputs = self._outputs.get(model)
        if outputs is None:
            outputs = self._outputs[model] = Outputs()
        outputs.learn(output_tokens)
        if token_s is not None and 0 < token_s < inf:
            measured.token_s += 0.05 * (min(token_s, _FAR * measured.token_s) - measured.token_s)
        self._latest[model] = measured

    def full(self, worker: str, model: str, prompt_tokens: int, output_tokens: int, now_s: float) -> bool:
        """A worker is full, and has been since it was said so last unless `lapse` came between. The totals are what it
        has done so far; both grow with reports of progress. Each stretch of `LEAST_S` or a little more is a record;
        whether one was learnt."""
        mark = self._marks.get(worker)
        if mark is not None and now_s - mark[0] < LEAST_S:
            return False
        self._marks[worker] = now_s, prompt_tokens, output_tokens
        if mark is None or prompt_tokens < mark[1] or output_tokens < mark[2]:
            return False
        self.learn(worker, model, now_s - mark[0], prompt_tokens - mark[1], output_tokens - mark[2])
        return True

    def lapse(self, worker: str) -> None:
        """It is not full, or gone."""
        self._marks.pop(worker, None)

    def forget(self, worker: str) -> None:
        """`worker` is gone."""
        self.lapse(worker)
        for key in [key for key in self._measured if key[0] == worker]:
            del self._measured[key]

    # -- what is estimated

    def rates(self, worker: str, model: str) -> Rates:
        """As measured there; else as at the worker that measured this model last; else as guessed."""
        return self._of(worker, model).rates

    def wait(
        self, worker: str, model: str, ahead: Ahead, free_tokens: float = 0.0, own_tokens: float = 0.0
    ) -> Wait:
        """Of a request that needs `own_tokens` of memory, with `ahead` in front of it and `free_tokens` of the KV
        cache not promised to anybody."""
        rates = self.rates(worker, model)
        if self.literal:
            mean_s = ahead.output_tokens / rates.throughput
            return Wait(mean_s, mean_s)
        beyond = ahead.beyond(free_tokens, own_tokens)
        mean_s = rates.prompt_s * beyond.prompt_tokens + rates.output_s * beyond.output_tokens
        return Wait(mean_s, mean_s + self.z * rates.output_s * sqrt(beyond.output_variance))

    def pace(self, worker: str, model: str) -> Pace:
        """What drains and tails are made of: W and C - W of groups are linear in their tokens."""
        measured = self._of(worker, model)
        if self.literal:
            return Pace(0.0, 1 / measured.rates.throughput, self.longest_tokens * measured.token_s)
        outputs = self._outputs.get(model)
        tokens = None if outputs is None else outputs.quantile(0.99)
        tail_s = (self.longest_tokens if tokens is None else tokens) * measured.token_s
        return Pace(measured.rates.prompt_s, measured.rates.output_s, tail_s)

    # -- how good it was

    def predict(self, request_id: str, mean_s: float) -> None:
        """This was said of a request's wait. The first one counts."""
        self._predicted.setdefault(request_id, mean_s)
        if len(self._predicted) > 100 * PREDICTIONS:
            self._predicted.popitem(last=False)

    def begun(self, request_id: str, wait_s: float | None) -> None:
        """It waited so long; None: it was given up, or moved by a new plan, and says nothing."""
        mean_s = self._predicted.pop(request_id, None)
        if mean_s is not None and wait_s is not None:
            self._compared.append((mean_s, wait_s))

    @property
    def r2(self) -> float | None:
        """1 - (squared errors) / (squared deviations from the mean) of the last predictions; None while there are few,
        or all waited alike."""
        return r2(self._compared) if len(self._compared) >= ENOUGH else None

    def _of(self, worker: str, model: str) -> _Measured:
        measured = self._measured.get((worker, model))
        if measured is None:
            known = self._latest.get(model)
            if known is None:
                measured = _Measured(Rates(self.prompt_s, self.output_s), self.token_s)
            else:
                rates = Rates(known.rates.prompt_s, known.rates.output_s)
                measured = _Measured(rates, known.token_s)
            self._measured[worker, model] = measured
        return measured


def r2(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Of (predicted, actual): 1 is perfect, 0 as good as their mean. None if all actual ones are alike."""
    mean = sum(actual for _, actual in pairs) / len(pairs)
    deviations = sum((actual - mean) ** 2 for _, actual in pairs)
    if deviations <= 0:
        return None
    return 1 - sum((actual - predicted) ** 2 for predicted, actual in pairs) / deviations


def _bounded(rate_s: float) -> float:
    return min(max(rate_s, _LEAST_S), _MOST_S)
