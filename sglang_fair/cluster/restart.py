"""When a process that died is restarted: after a wait that doubles with each early death. Pure.

A process that dies early again and again has a wrong argument, and is given up. But a replica that was ready has been
started rightly: it may have died of a request, and such deaths do not count. Nor is the last replica of a model given
up, since without it nothing is left to serve.
"""

from collections.abc import Iterable
from dataclasses import dataclass

MOST_DOUBLINGS = 64
"""Beyond which a delay has long been the longest one, and a power soon no number."""


@dataclass(frozen=True)
class Deaths:
    """Of one process, in a row."""

    early: int = 0
    counted: int = 0
    """Those for which it may be given up."""


@dataclass(frozen=True)
class RestartRule:
    """A death is early if it comes before the process has been ready for `early_s`."""

    first_delay_s: float = 0.5
    factor: float = 2.0
    longest_delay_s: float = 30.0
    early_s: float = 60.0
    give_up_after: int = 5
    """Counted deaths in a row after which the process is given up."""

    def after(self, before: Deaths, served_s: float, *, is_replica: bool) -> Deaths:
        """With the death of a process that was ready for `served_s` seconds, 0 if it never was."""
        if served_s >= self.early_s:
            return Deaths()
        counted = 0 if is_replica and served_s > 0 else before.counted + 1
        return Deaths(before.early + 1, counted)

    def delay_s(self, deaths: Deaths, *, is_last: bool = False) -> float | None:
        """Seconds to wait before the next start; None: give up. `is_last`: the last replica of a model."""
        if deaths.counted >= self.give_up_after and not is_last:
            return None
        doublings = min(max(0, deaths.early - 1), MOST_DOUBLINGS)
        return min(self.first_delay_s * self.factor**doublings, self.longest_delay_s)


def is_last(models: Iterable[str], others: Iterable[Iterable[str]]) -> bool:
    """Whether a replica that has these models, or can load them, is the only one for one of them. `others`: the same
    of those that are not given up."""
    return not set(models) <= {model for each in others for model in each}
