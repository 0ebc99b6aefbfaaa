"""A policy with a hasty clock, for tests. It must be known before the overlay is imported, which keeps the names."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_fair import core
from sglang_fair.core.rpm import Rpm
from sglang_fair.core.windows import MINUTE_S

HASTY_MINUTE_S = 0.5


@dataclass
class Hasty(Rpm):
    """Requests per half a second."""

    name: ClassVar[str] = "hasty"

    def tick(self, now_s: float) -> None:
        super().tick(now_s * MINUTE_S / HASTY_MINUTE_S)


core.POLICIES = {**core.POLICIES, Hasty.name: Hasty}
