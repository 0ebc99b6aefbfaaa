"""How long an answer will be: predictors, for policies that charge output before it is made (VTC, Algorithm 3).

A counter that learns of an output only while it is made lets a client start a pool full of long answers before
the first is charged. `FairQueue` charges the predicted output at admission, beside the prompt; tokens beyond
the prediction are charged as they come, and what was charged and not made is given back when the request ends.
A prediction moves when a counter moves, never what a request costs in the end.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from sglang_fair.core.job import Job


class Predictor(Protocol):
    """Guesses outputs. Pure: the same jobs, in the same order, get the same guesses."""

    def predict(self, job: Job) -> float:
        """Output tokens that `job` will make, at least 0. Asked once, when it is admitted."""

    def observe(self, job: Job) -> None:
        """`job`, which had been admitted, has ended after `job.output_tokens`, by itself or by abort."""


@dataclass
class MeanOfLast:
    """The mean of the client's last `count` outputs, of fewer at first, and 0 before the first.

    Remembers `max_clients`; the one that has not finished anything for the longest time is forgotten.
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
    """What the job says (`expected_output_tokens`); `otherwise` guesses for a job that says nothing."""

    otherwise: Predictor = field(default_factory=MeanOfLast)

    def predict(self, job: Job) -> float:
        expected = job.expected_output_tokens
        return self.otherwise.predict(job) if expected is None else expected

    def observe(self, job: Job) -> None:
        self.otherwise.observe(job)


@dataclass
class Noisy:
    """Another predictor's guess, wrong by up to `percent` in either direction, uniformly (VTC(±50%)).

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
