"""How many items a replica has at a time, where nobody asks for them: as many as make it faster. Pure.

Rule. It begins with few, and each answer allows one more, up to `4 * FIRST`. From then on, while there is more to send
than may be sent, the tokens that come back are measured in epochs. Of two epochs with different numbers the larger
number stays only if it brought `GAIN` more, and every few epochs the smaller one is tried: it stays if it lost less
than that. What cannot be reached sets it to `LEAST`, from where it comes back as it began. Unit: items in flight for
each replica. Bounds: from `LEAST` to the operator's. Leak: tokens of a replica vary with what others send; a wrong step
is undone by the next epochs.
"""

from math import ceil

LEAST, FIRST = 2, 8
STEP = 1.5
GAIN = 1.05
EPOCH_S = 5.0
ROUNDS = 2
"""An epoch has this many answers for each item that may be in flight, or it says nothing."""
REST_EPOCHS = 6
"""Between two trials."""


class Pace:
    """Of the replicas of one model."""

    def __init__(self, most: int) -> None:
        self.most = max(LEAST, most)
        self.limit = min(FIRST, self.most)
        self._until = min(4 * FIRST, self.most)
        """Up to here each answer allows one more."""
        self._before: tuple[int, float] | None = None
        """The limit that is being compared with, and its tokens a second."""
        self._rest = 0
        self._tries_less = False
        self._since_s: float | None = None
        self._tokens = 0
        self._answers = 0

    def answered(self, tokens: int) -> None:
        """An item is over that has taken so many."""
        self._tokens += tokens
        self._answers += 1
        if self.limit < self._until:
            self.limit += 1

    def trouble(self) -> None:
        """A replica, or what is before it, could not be reached."""
        self._until = max(self._until, self.limit)
        self.limit = LEAST
        self._before, self._since_s = None, None

    def tick(self, now_s: float, replicas: int, *, is_full: bool) -> None:
        """`is_full`: as many are in flight as may be, and more wait."""
        if not is_full or self._since_s is None:
            self._since_s, self._tokens, self._answers = (now_s if is_full else None), 0, 0
            return
        elapsed_s = now_s - self._since_s
        if self.limit < self._until:
            return
        if elapsed_s < EPOCH_S or self._answers < ROUNDS * self.limit * max(1, replicas):
            return
        self._judge(self._tokens / elapsed_s)
        self._since_s, self._tokens, self._answers = now_s, 0, 0

    def _judge(self, rate: float) -> None:
        """At the end of an epoch with so many tokens a second."""
        if self._rest:
            self._rest -= 1
            return
        self._until = LEAST
        if self._before is None:  # a trial begins: less and more in turn
            larger, smaller = min(self.most, ceil(self.limit * STEP)), max(LEAST, int(self.limit / STEP))
            chosen = smaller if self._tries_less else larger
            self._tries_less = not self._tries_less
            if chosen != self.limit:
                self._before, self.limit = (self.limit, rate), chosen
            return
        before, before_rate = self._before
        self._before = None
        if self.limit > before:
            is_better = rate >= GAIN * before_rate
            self._tries_less = not is_better
        else:
            is_better = rate * GAIN >= before_rate
        if not is_better:
            self.limit = before
            self._rest = REST_EPOCHS
