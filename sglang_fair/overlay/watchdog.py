"""Ends a replica whose scheduler hangs, so that whatever started the replica starts it again.

Rule. A scheduler hangs if none of its threads has run for `limit_s` seconds (something holds its interpreter, as a
regular expression does that backtracks without end), or if its loop has not come round for so long although it neither
computes nor carries out an order. An idle loop comes round once a second. A loop that stands in a forward pass, with
its interpreter free, is left to SGLang's own `--watchdog-timeout`, a thread of the scheduler's that can run then.
Whose time. The process that answers HTTP looks, in its own time (`router.silence`): a machine that stood still has
hanging schedulers no more than before. A scheduler that was stopped alone counts.
End. Each scheduler writes the stacks of its threads into the replica's log, by a signal handler in C that needs no
interpreter (`faulthandler`). Then all processes of the replica are killed, and it ends with exit code 1.

Nothing is watched before the server is up, so neither the loading of weights nor compilations count.
"""

import faulthandler
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from router.silence import ActiveClock
from sglang_fair.overlay.heartbeat import Heartbeats, Reading

logger = logging.getLogger(__name__)

LOOK_S = 0.5
OWN_GAP_S = 2.0
"""A longer time between two looks is one in which this process itself did not run."""

STACKS_S = 1.0
"""Time for the schedulers to write their stacks."""

STACKS = signal.SIGUSR2
"""SGLang uses it for nothing else."""


class Watch:
    """Which schedulers hang, by what they have written. Times are the caller's."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._own = ActiveClock(OWN_GAP_S)
        self._moved: dict[tuple[int, str], tuple[float, float]] = {}
        """What each rank wrote last, and since when in own time."""

    def look(self, now_s: float, readings: Mapping[int, Reading]) -> list[int]:
        """The ranks that hang at `now_s` of a monotonic clock."""
        own_s = self._own.look(now_s)

        def stands(rank: int, what: str, written_s: float) -> bool:
            last_s, since_s = self._moved.get((rank, what), (None, own_s))
            if written_s != last_s:
                self._moved[rank, what] = written_s, since_s = written_s, own_s
            return own_s - since_s > self._limit_s

        return [
            rank
            for rank, one in readings.items()
            if any(
                (stands(rank, "ran", one.ran_s), stands(rank, "passed", one.passed_s) and not one.computes)
            )
        ]


def show_stacks_when_asked() -> None:
    """Has this process, a scheduler, write the stacks of its threads at the signal `STACKS`."""
    faulthandler.register(STACKS, all_threads=True)


def start(manager: Any, limit_s: float) -> None:
    """Watches the schedulers of `manager`'s server from a thread of this process. `limit_s` 0: does nothing."""
    if limit_s > 0:
        watched = manager, Watch(limit_s), Heartbeats()
        threading.Thread(target=_watch, args=watched, name="sglang-fair-watchdog", daemon=True).start()


def _watch(manager: Any, watch: Watch, heartbeats: Heartbeats) -> None:
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    while not manager.gracefully_exit:
        time.sleep(LOOK_S)
        if manager.server_status == ServerStatus.Starting:
            continue
        if hanging := watch.look(time.monotonic(), heartbeats.readings()):
            _end(hanging, len(manager.rid_to_state))


def _end(hanging: Collection[int], in_flight: int) -> None:
    from sglang.srt.utils import kill_process_tree
    from sglang.srt.utils.cudacore_pyspy_dump_utils import collect_scheduler_processes

    try:
        for process in collect_scheduler_processes():
            process.send_signal(STACKS)
        time.sleep(STACKS_S)
        logger.error(
            "sglang-fair: scheduler %s hangs, with %d requests in flight: this replica ends. Its stacks are above",
            ", ".join(map(str, hanging)),
            in_flight,
        )
        kill_process_tree(os.getpid(), include_parent=False)
    finally:
        os._exit(1)
