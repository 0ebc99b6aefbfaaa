"""Heartbeats: a replica's schedulers write when they last moved, and the process that answers HTTP reads it.

    ran       a thread of the scheduler's process ran: the process is not stopped, and nothing holds its interpreter
    passed    the scheduler's loop began its latest iteration
    computes  since then it entered a forward pass, began to wait for the results of one, or carries out an order, as
              the loading of weights: that may take long

Each is a reading of the monotonic clock, which all processes of a machine share. They lie in shared memory (see
`shared_file`), so a scheduler that hangs cannot make its reader hang.
"""

import mmap
import os
import threading
import time
from array import array
from collections.abc import MutableMapping
from typing import Any, NamedTuple

from sglang_fair.overlay import shared_file

VARIABLE = "SGLANG_FAIR_HEARTBEATS"
"""The environment variable with the path of the shared memory."""

SLOTS = 128
"""Schedulers with a slot of their own: the data-parallel ranks of one machine."""

RUN_INTERVAL_S = 0.5

_RAN, _PASSED, _COMPUTES = range(3)
_READINGS = 3
_BYTES = SLOTS * _READINGS * 8


def share(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes the shared memory for this process and its children."""
    shared_file.share(VARIABLE, _BYTES, environ)


class Heartbeat:
    """The writing side, of one scheduler. Each call costs one reading of the clock."""

    def __init__(self, readings: Any, at: int = 0) -> None:
        """Writes into `readings`, a sequence of floats, from index `at` on."""
        self._readings = readings
        self._passed, self._computes = at + _PASSED, at + _COMPUTES

    def passed(self) -> None:
        """The scheduler's loop begins another iteration."""
        self._readings[self._passed] = time.monotonic()

    def computes(self) -> None:
        """A forward pass begins, the wait for the results of one, or an operator's order."""
        self._readings[self._computes] = time.monotonic()


def attach(rank: int | None, environ: MutableMapping[str, str] = os.environ) -> Heartbeat:
    """The heartbeat of the scheduler of data-parallel rank `rank`; None for one that follows another's steps.

    Without shared memory, or a slot in it, what it writes is not read.
    """
    path = environ.get(VARIABLE)
    if path is None or rank is None or rank >= SLOTS:
        return Heartbeat(array("d", [0.0] * _READINGS))
    readings, at = _open(path, mmap.ACCESS_WRITE), rank * _READINGS

    def run() -> None:
        while True:
            readings[at + _RAN] = time.monotonic()
            time.sleep(RUN_INTERVAL_S)

    threading.Thread(target=run, name="sglang-fair-heartbeat", daemon=True).start()
    return Heartbeat(readings, at)


class Reading(NamedTuple):
    """What one scheduler wrote last, in seconds of the monotonic clock."""

    ran_s: float
    passed_s: float
    computes: bool


class Heartbeats:
    """The reading side: all schedulers of a server."""

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Without shared memory there are no schedulers to read of."""
        path = environ.get(VARIABLE)
        self._readings = array("d") if path is None else _open(path, mmap.ACCESS_READ)

    def readings(self) -> dict[int, Reading]:
        """By rank, of each scheduler that has begun to serve."""
        starts = range(0, len(self._readings), _READINGS)
        slots = (self._readings[at : at + _READINGS] for at in starts)
        return {
            rank: Reading(slot[_RAN], slot[_PASSED], slot[_COMPUTES] >= slot[_PASSED])
            for rank, slot in enumerate(slots)
            if slot[_PASSED] > 0
        }

    def read(self, now_s: float) -> list[dict[str, Any]]:
        """For each scheduler that has begun to serve: the seconds since it last ran and passed, and whether it
        computes. Fit for JSON."""
        return [
            {
                "ran_s_ago": round(now_s - one.ran_s, 3),
                "passed_s_ago": round(now_s - one.passed_s, 3),
                "computes": one.computes,
            }
            for one in self.readings().values()
        ]


def _open(path: str, access: int) -> Any:
    with open(path, "r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), _BYTES, access=access)).cast("d")
