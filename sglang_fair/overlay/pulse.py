"""When a replica's schedulers last moved: they write it, the process that answers HTTP reads it, nobody waits.

    ran       a thread of the scheduler's process ran: the process is not stopped, nor its interpreter held
    passed    the scheduler's loop came round
    computes  since then it went into a forward pass, or into the wait for the results of one

Each is a reading of the monotonic clock, which all processes of a machine share. The memory is a file without a
name that belongs to the process that reads the arguments; its children open it by way of /proc. So nothing is
left behind by whatever dies, and a scheduler that hangs cannot make its reader hang.
"""

import mmap
import os
import threading
import time
from array import array
from collections.abc import MutableMapping
from typing import Any

VARIABLE = "SGLANG_FAIR_PULSE"
"""Where the processes of a server find the memory that they share."""

SLOTS = 128
"""Schedulers that can be told apart: data-parallel ranks of one machine."""

RUN_INTERVAL_S = 0.5

_RAN, _PASSED, _COMPUTES = range(3)
_READINGS = 3
_BYTES = SLOTS * _READINGS * 8


def share(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make the memory, for this process and its children; once is enough."""
    if environ.get(VARIABLE, "").startswith(f"/proc/{os.getpid()}/"):
        return
    descriptor = os.memfd_create("sglang-fair-pulse")
    os.ftruncate(descriptor, _BYTES)
    environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{descriptor}"


class Pulse:
    """One scheduler's side. Costs a reading of the clock each time."""

    def __init__(self, readings: Any, at: int = 0) -> None:
        """Into `readings`, a sequence of floats, from index `at` on."""
        self._readings = readings
        self._passed, self._computes = at + _PASSED, at + _COMPUTES

    def passed(self) -> None:
        """The loop comes round."""
        self._readings[self._passed] = time.monotonic()

    def computes(self) -> None:
        """A forward pass begins, or the wait for its results."""
        self._readings[self._computes] = time.monotonic()


def attach(rank: int | None, environ: MutableMapping[str, str] = os.environ) -> Pulse:
    """The pulse of the scheduler of data-parallel rank `rank`; None for one that follows another's steps.

    Where nobody shares memory with it, it is written for nobody.
    """
    path = environ.get(VARIABLE)
    if path is None or rank is None or rank >= SLOTS:
        return Pulse(array("d", [0.0] * _READINGS))
    readings, at = _open(path, mmap.ACCESS_WRITE), rank * _READINGS

    def run() -> None:
        while True:
            readings[at + _RAN] = time.monotonic()
            time.sleep(RUN_INTERVAL_S)

    threading.Thread(target=run, name="sglang-fair-pulse", daemon=True).start()
    return Pulse(readings, at)


class Pulses:
    """The reader's side: all schedulers of a server."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Of nobody where no memory is shared."""
        path = environ.get(VARIABLE)
        self._readings = array("d") if path is None else _open(path, mmap.ACCESS_READ)

    def read(self, now_s: float) -> list[dict[str, Any]]:
        """Of each scheduler that has begun to serve, JSON-ready: how long ago it ran and passed, in seconds,
        and whether it computes."""
        slots = [self._readings[at : at + _READINGS] for at in range(0, len(self._readings), _READINGS)]
        return [
            {
                "ran_s_ago": round(now_s - slot[_RAN], 3),
                "passed_s_ago": round(now_s - slot[_PASSED], 3),
                "computes": slot[_COMPUTES] >= slot[_PASSED],
            }
            for slot in slots
            if slot[_PASSED] > 0
        ]


def _open(path: str, access: int) -> Any:
    with open(path, "r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), _BYTES, access=access)).cast("d")
