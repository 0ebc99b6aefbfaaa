"""Round robin per client: each client goes through all workers in turn.

Unit of fairness: with a fair scheduler at every worker, backlogged clients differ by at most the number of workers
times the local bound (DLPM paper, Theorem A.6). With VTC at the workers it is the paper's fair baseline. Trade-off:
every client's load is spread evenly, and every prefix is computed on every worker.

A hash of its name says where a client starts, so that many clients with one request each do not meet at the first
worker.
"""

import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from router.placement.contract import Placement, Request, WorkerView
from router.placement.round_robin import after
from router.radix import Match


@dataclass
class ClientRoundRobin(Placement):
    """Remembers the last worker of the latest `max_clients` clients; the others start over."""

    uses_caches: ClassVar[bool] = False
    uses_progress: ClassVar[bool] = False

    max_clients: int = 100_000

    _last: OrderedDict[str, str] = field(default_factory=OrderedDict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.max_clients < 1:
            raise ValueError(f"max_clients is {self.max_clients}: at least one is needed")

    def place(self, request: Request, match: Match, workers: Sequence[WorkerView], now_s: float) -> str:
        """The worker after this client's last one, in the order of names."""
        last = self._last.get(request.client)
        if last is None:
            return workers[zlib.crc32(request.client.encode()) % len(workers)].name
        return after(last, workers)

    def placed(self, request: Request, worker: str, match: Match, now_s: float) -> None:
        """Remembers the worker, and forgets the client that has not come for longest."""
        self._last[request.client] = worker
        self._last.move_to_end(request.client)
        if len(self._last) > self.max_clients:
            self._last.popitem(last=False)
