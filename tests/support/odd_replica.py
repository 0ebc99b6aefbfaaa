"""`python -m sglang_fair.engines.replica` as tests need it: with overlap scheduling, as on a GPU, and a hasty clock."""

import sys
from dataclasses import dataclass
from typing import ClassVar

from sglang_fair import core
from sglang_fair.core.rpm import Rpm
from sglang_fair.core.windows import MINUTE_S
from sglang_fair.engines import cpu, replica

HASTY_MINUTE_S = 0.5


@dataclass
class Hasty(Rpm):
    """Requests per half a second."""

    name: ClassVar[str] = "hasty"

    def tick(self, now_s: float) -> None:
        super().tick(now_s * MINUTE_S / HASTY_MINUTE_S)


# SGLang's spawned processes import this module again, and with it what it changes.
core.POLICIES = {**core.POLICIES, Hasty.name: Hasty}
cpu.SERVER_ARGUMENTS = tuple(word for word in cpu.SERVER_ARGUMENTS if word != "--disable-overlap-schedule")

if __name__ == "__main__":
    sys.exit(replica.main())
