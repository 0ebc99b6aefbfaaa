"""How long others have been silent, counted in the time in which this process itself ran.

A process that stood still, for want of a processor or because its machine was paused, has received nothing meanwhile,
and its peers may have stood still with it. So their silence means nothing during that time.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class ActiveClock:
    """A monotonic clock that excludes time in which this process was suspended. While it runs, two looks are at most
    `most_s` apart; a longer time between them does not count."""

    most_s: float
    _now_s: float = 0.0
    _looked_s: float | None = None

    def look(self, now_s: float) -> float:
        """What it shows at `now_s` of a monotonic clock, in seconds."""
        if self._looked_s is None:
            self._looked_s = now_s
        gap_s = now_s - self._looked_s
        if gap_s > 0:
            self._looked_s = now_s
            if gap_s <= self.most_s:
                self._now_s += gap_s
        return self._now_s
