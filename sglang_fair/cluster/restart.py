"""When a process that died is restarted: after a wait that doubles with each early death. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartRule:
    """A death is early if it comes before the process has been ready for `early_s`."""

    first_delay_s: float = 0.5
    factor: float = 2.0
    longest_delay_s: float = 30.0
    early_s: float = 60.0
    give_up_after: int = 5
    """Early deaths in a row after which the process is given up."""

    def early_deaths(self, before: int, served_s: float) -> int:
        """Early deaths in a row including this one, of a process that was ready for `served_s` seconds."""
        return before + 1 if served_s < self.early_s else 0

    def delay_s(self, early_deaths: int) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        if early_deaths >= self.give_up_after:
            return None
        return min(self.first_delay_s * self.factor ** max(0, early_deaths - 1), self.longest_delay_s)
