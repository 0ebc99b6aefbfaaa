"""Each worker in turn, in the order of names; caches and the length of requests do not count.

round_robin         whoever asks: SGLang's own default. No fairness: a client gets service in proportion to what it
                    sends. With a local LPM queue it is the baseline "RR + LPM" of the DLPM paper
client_round_robin  each client in turn: with a fair scheduler at every worker, backlogged clients differ by at most
                    the number of workers times the local bound (DLPM paper, Theorem A.6). With VTC at the workers
                    it is the paper's fair baseline. Every prefix is computed on every worker
"""

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView
from router.radix import Match


@dataclass
class RoundRobin(Placement):
    """Remembers the last worker; the next one by name is next."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    _last: str = field(default="", init=False, repr=False)

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        return _after(self._last, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        self._last = worker


@dataclass
class ClientRoundRobin(Placement):
    """Remembers the last worker of the latest `max_clients` clients; the others start over. A hash of its name says
    where a client starts, so that many clients with one request each do not meet at the first worker."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    max_clients: int = 100_000

    _last: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_clients < 1:
            raise ValueError(f"max_clients is {self.max_clients}: at least one is needed")

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        last = self._last.get(request.client)
        if last is None:
            return workers[zlib.crc32(request.client.encode()) % len(workers)].name
        return _after(last, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        self._last[request.client] = worker
        self._last.move_to_end(request.client)
        if len(self._last) > self.max_clients:
            self._last.popitem(last=False)


def _after(last: str, workers: Sequence[WorkerView]) -> str:
    """The first name greater than `last`, or the first of all. `workers` are in the order of names."""
    return next((worker.name for worker in workers if worker.name > last), workers[0].name)
