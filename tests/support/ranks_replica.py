"""`python -m sglang_fair.engines.replica` of several ranks, as tests need it: each rank tells what it decided, and the
processes' clocks differ, as those of two machines do. With the policy `hasty` of `odd_replica`.

GET /fair has every rank write a report into the directory that `REPORTS` names: its books, and a digest of all that
its queue was told, in order.
"""

import json
import os
import sys
import time
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sglang_fair import overlay
from sglang_fair.engines import replica
from tests.support import odd_replica
from tests.support.live import REPORTS

GOLDEN = 0.618
"""Processes with numbers next to each other get clocks far from each other, within a minute of the policy."""

_install = overlay.install
_monotonic = time.monotonic


def odd_monotonic() -> float:
    return _monotonic() + os.getpid() * GOLDEN % 1 * odd_replica.HASTY_MINUTE_S


def install() -> None:
    """The overlay, whose decisions are noted."""
    _install()
    from sglang.srt.runtime_context import get_parallel

    from sglang_fair.overlay.clock import Clock
    from sglang_fair.overlay.replica import ReplicaFairness

    made, status = ReplicaFairness.__init__, ReplicaFairness.status

    def noting(fair: Any, *args: Any, **kwargs: Any) -> None:
        made(fair, *args, **kwargs)
        fair.digest, fair.told = blake2b(digest_size=16), 0
        for name in ("arrive", "leave", "admit", "retract", "finish", "refuses"):
            note(fair, name)

    def note(fair: Any, name: str) -> None:
        original = getattr(fair.queue, name)

        def noted(job: Any, **kwargs: Any) -> Any:
            result = original(job, **kwargs)
            fair.told += 1
            fair.digest.update(
                f"{name} {getattr(job, 'id', job)} {sorted(kwargs.items())} {result}\n".encode()
            )
            return result

        setattr(fair.queue, name, noted)

    def report(fair: Any, waiting: list[Any]) -> dict[str, Any]:
        books: dict[str, Any] = status(fair, waiting)
        ranks = get_parallel()
        told = {
            "digest": fair.digest.hexdigest(),
            "told": fair.told,
            "books": books,
            "now_s": getattr(fair, "now_s", None),
        }
        whole = Path(os.environ[REPORTS], f"{ranks.pp_rank}-{ranks.tp_rank}.json")
        part = whole.with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(whole)
        return books

    ReplicaFairness.__init__, ReplicaFairness.status = noting, report  # type: ignore[method-assign]
    Clock.__init__.__kwdefaults__["read"] = odd_monotonic  # where it was imported before this


# SGLang's spawned processes import this module again.
overlay.install = install
time.monotonic = odd_monotonic

if __name__ == "__main__":
    sys.exit(replica.main())
