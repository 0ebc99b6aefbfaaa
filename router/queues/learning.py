"""What a worker with a full window did, as a router can see it: records for the `Estimator`.

    full      the worker's tokens in flight have not been below its KV cache, so its batches were as large as they get
    record    the prompt tokens whose prefill was over, and the output tokens produced, while it was full for
              `LEAST_S` seconds or a little more. Each such stretch is counted once, and none that was interrupted

The two numbers are running totals that grow with every report of progress and with every end. What was begun before a
stretch and what is under way at its end are counted in part or late; in a steady flow both are the same.
"""

from dataclasses import dataclass
from typing import NamedTuple

LEAST_S = 2.0


class Record(NamedTuple):
    """Seconds at saturation, and what was done in them."""

    seconds: float
    prompt_tokens: float
    output_tokens: float


@dataclass(slots=True)
class _Mark:
    since_s: float
    prompt_tokens: int
    output_tokens: int


class Learning:
    """Marks of all workers. No clock."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}

    def full(self, worker: str, prompt_tokens: int, output_tokens: int, now_s: float) -> Record | None:
        """A worker is full, and has been since it was said so last unless `lapse` came between. The totals are what it
        has done so far. A record if the stretch is long enough; then the next one begins."""
        mark = self._marks.get(worker)
        if mark is not None and now_s - mark.since_s < LEAST_S:
            return None
        self._marks[worker] = _Mark(now_s, prompt_tokens, output_tokens)
        if mark is None:
            return None
        done = prompt_tokens - mark.prompt_tokens, output_tokens - mark.output_tokens
        return Record(now_s - mark.since_s, *done) if sum(done) > 0 and min(done) >= 0 else None

    def lapse(self, worker: str) -> None:
        """It is not full, or gone."""
        self._marks.pop(worker, None)
