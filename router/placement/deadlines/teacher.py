"""What workers have done, told to the queues and their estimator: rates while they are full (`queues.learning`), how
many requests run there at a time, how long answers are, and how soon their first token comes.
"""

from router.placement.contract import Ended, WorkerView
from router.queues.learning import Learning
from router.queues.virtual import VirtualQueues

_FASTER = 0.1
"""Weight of the last one in a mean."""
_CHANGED = 1.25
"""By this factor a batch must have changed for groups to be cut anew."""


class Teacher:
    """Tells the queues and their estimator what workers have done."""

    def __init__(self, queues: VirtualQueues) -> None:
        self._queues = queues
        self._learning = Learning()

    def look_at(self, view: WorkerView, now_s: float) -> None:
        """A worker has all that it may have."""
        worker = self._queues.of(view.name)
        if not worker.is_full or worker.loaded is None:
            self._learning.lapse(view.name)
            return
        record = self._learning.full(view.name, view.prefilled_tokens, view.produced_tokens, now_s)
        if record is not None:
            self._queues.estimator.learn(view.name, worker.loaded, *record)
            self._set_batch(worker.loaded, len(worker.in_flight))

    def idle(self, worker: str) -> None:
        """Nobody waits, and something has ended there."""
        if not self._queues.of(worker).is_full:
            self._learning.lapse(worker)

    def gone(self, worker: str) -> None:
        """A worker is gone."""
        self._learning.lapse(worker)

    def answered(self, ended: Ended, sent_s: float, tier: int, now_s: float) -> None:
        """An answer is complete whose request was sent then, in this tier."""
        made = self._queues.of(ended.worker)
        self._queues.estimator.learn_answer(
            ended.worker, ended.request.model, ended.output_tokens, ended.tpot_s
        )
        if ended.tpot_s is not None and not tier:
            wrote_s = ended.tpot_s * max(0, ended.output_tokens - 1)
            first_s = max(0.0, now_s - sent_s - wrote_s)
            made.first_token_s += _FASTER * (first_s - made.first_token_s)

    def _set_batch(self, model: str, requests: int) -> None:
        known = self._queues.groups.batch(model)
        mean = known + _FASTER * (requests - known)
        if not 1 / _CHANGED < requests / known < _CHANGED:
            self._queues.groups.set_batch(model, mean)
            self._queues.settle()
