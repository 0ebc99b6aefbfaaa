"""`python -m sglang_fair.engines.replica` as tests need it: with overlap scheduling, as on a GPU, and a hasty clock."""

import sys

from sglang_fair.engines import cpu, replica
from tests.support.odd_policy import HASTY_MINUTE_S

__all__ = ["HASTY_MINUTE_S"]

# SGLang's spawned processes import this module again, and with it what it changes.
cpu.SERVER_ARGUMENTS = tuple(word for word in cpu.SERVER_ARGUMENTS if word != "--disable-overlap-schedule")

if __name__ == "__main__":
    sys.exit(replica.main())
