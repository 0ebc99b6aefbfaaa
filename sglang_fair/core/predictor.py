"""Predictors of output length, for policies that charge output before it is made (VTC, Algorithm 3).

If output is charged as it is made, a client can start a pool full of long answers before the first of them is charged.
With a predictor `Account` charges the predicted output at admission, together with the prompt. Tokens beyond the
prediction are charged as they come; what was charged and not made is given back when the request ends. So a prediction
changes when a counter moves, and never what a request costs in the end.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from sglang_fair.core.job import Job


class Predictor(Protocol):
    """Predicts outputs. Deterministic: the same jobs in the same order get the same predictions."""

    def predict(self, job: Job) -> float:
        """Output tokens that `job` will make, at least 0. Called once, at its admission."""

    def observe(self, job: Job) -> None:
        """`job` has ended, by itself or by abort, with `job.output_tokens`. It had been admitted."""


@dataclass
class MeanOfLast:
    """The mean of the client's last `count` outputs, or of as many as there are; 0 before the first.

    Remembers `max_clients` and forgets the client that has not finished a request for the longest time.
    """

    count: int = 5
    max_clients: int = 10_000
    _outputs: OrderedDict[str, tuple[int, ...]] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.count < 1 or self.max_clients < 1:
            raise ValueError(
                "a mean of the last outputs needs at least one output and one client, "
                f"not {self.count} and {self.max_clients}"
            )

    def predict(self, job: Job) -> float:
        outputs = self._outputs.get(job.client)
        return sum(outputs) / len(outputs) if outputs else 0.0

    def observe(self, job: Job) -> None:
        earlier = self._outputs.get(job.client, ())[1 - self.count :] if self.count > 1 else ()
        self._outputs[job.client] = (*earlier, job.output_tokens)
        self._outputs.move_to_end(job.client)
        if len(self._outputs) > self.max_clients:
            self._outputs.popitem(last=False)


@dataclass
class Oracle:
    """What the job announces (`expected_output_tokens`); `otherwise` predicts for a job without an announcement."""

    otherwise: Predictor = field(default_factory=MeanOfLast)

    def predict(self, job: Job) -> float:
        expected = job.expected_output_tokens
        return self.otherwise.predict(job) if expected is None else expected

    def observe(self, job: Job) -> None:
        self.otherwise.observe(job)


@dataclass
class Noisy:
    """Another predictor's value with a uniform error of up to `percent` in either direction (VTC(±50%)).

    The error is drawn from `seed` and the job's id, so it does not depend on the order of the jobs.
    """

    around: Predictor = field(default_factory=Oracle)
    percent: float = 50.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.percent <= 100:
            raise ValueError(f"noise must be between 0 and 100 percent, not {self.percent!r}")

    def predict(self, job: Job) -> float:
        error = Random(f"{self.seed} {job.id}").uniform(-self.percent, self.percent) / 100
        return self.around.predict(job) * (1 + error)

    def observe(self, job: Job) -> None:
        self.around.observe(job)
