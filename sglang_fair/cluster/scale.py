"""When a cluster starts one more replica, and of which model: while deadlines cannot be met without it. Pure.

    shortage  what the router's queues say: how many replicas more would do, and with which models
    lasts     it must be said for `lasts_s` in all, from which time when it is not said takes a quarter of itself: a
              burst that is over by then needs nobody, and one look without it does not begin anew
    settles   a replica that has come is given `settle_s` to work off what waited; then it must last anew
    most      so many are started, in all: those that are drained or die are not counted back
    failed    if one cannot be started (no GPU, no memory), the next attempt is made after `retry_s`

None is ever stopped: `sglang-fair workers drain` does that. Unit: replicas, one at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ScaleUp:
    """ValueError for a number or a time that is negative."""

    most: int
    lasts_s: float = 10.0
    settle_s: float = 30.0
    retry_s: float = 60.0

    added: int = field(default=0, init=False)
    """Replicas that were started so far."""
    _short_s: float = field(default=0.0, init=False)
    _looked_s: float | None = field(default=None, init=False)
    _not_before_s: float = field(default=float("-inf"), init=False)

    def __post_init__(self) -> None:
        if self.most < 0 or min(self.lasts_s, self.settle_s, self.retry_s) < 0:
            raise ValueError("how many, and how long, are not negative")

    def look(self, shortage: Mapping[str, Any] | None, now_s: float) -> str | None:
        """The model that one more replica is started with now; "" is the only one that there is, or whichever the
        fewest have. None: none is started."""
        passed_s = 0.0 if self._looked_s is None else now_s - max(self._looked_s, self._not_before_s)
        self._looked_s = now_s
        if now_s < self._not_before_s:
            return None
        is_short = _missing(shortage) > 0
        self._short_s = max(0.0, self._short_s + (passed_s if is_short else -passed_s / 4))
        if not is_short or self.added >= self.most or self._short_s < self.lasts_s:
            return None
        return _model(shortage)

    def started(self, now_s: float) -> None:
        self.added += 1
        self._short_s, self._not_before_s = 0.0, now_s + self.settle_s

    def failed(self, now_s: float) -> None:
        self._short_s, self._not_before_s = 0.0, now_s + self.retry_s


def _missing(shortage: Mapping[str, Any] | None) -> int:
    """How many are known to help. What the router says is believed if it can be."""
    if shortage is None:
        return 0
    more, least = shortage.get("more"), shortage.get("least")
    return next((count for count in (more, least) if isinstance(count, int) and count > 0), 0)


def _model(shortage: Mapping[str, Any] | None) -> str:
    models = (shortage or {}).get("models")
    if not isinstance(models, Mapping) or not models:
        return ""
    return str(max(sorted(models), key=lambda model: models[model]))
