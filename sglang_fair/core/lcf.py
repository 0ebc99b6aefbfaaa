"""LCF, least counter first: VTC without the lift. The VTC paper's baseline that shows what the lift is for.

Rule: the client with the smallest counter goes next. A client that joins the queue keeps its counter; a new client
starts at 0.

Unit of fairness: service units in total since the server started. Bound: none between clients that wait, because a
client that was away longer is owed more. A client that comes late, or comes back late, is served alone until it has
caught up with what the others got in the meantime.
Knobs: the weights; `remembered_clients`, how many absent clients' counters are kept.
Trade-offs: equal totals over a day suit a shared budget, not a shared queue. Known leak: a new name starts at 0, and so
does an absent client beyond `remembered_clients`; the smallest counters, which gain least by it, are forgotten first.
"""

from dataclasses import dataclass
from typing import ClassVar

from sglang_fair.core.vtc import Vtc


@dataclass
class Lcf(Vtc):
    """Smallest counter first, no client is lifted."""

    name: ClassVar[str] = "lcf"
    shares_steps: ClassVar[bool] = False
    remembered_clients: int = 10_000

    def idle(self, client: str) -> None:
        super().idle(client)
        while len(self._idle) > self.remembered_clients and (poorest := self._idle.first()) is not None:
            self._forget(poorest)

    def bound(self, input_units: float, output_units: float) -> float | None:
        """None: there is no limit to what a client is owed for its absence."""
        return None

    def owes(self, client: str) -> bool:
        """False: there is no bound that would want to know."""
        return False

    def _floor(self) -> float:
        return 0.0
