"""A replica's counters by client, from its queue and its ledger.

A client that gets a label (`labels`) is counted under it from then on: what the ledger had for it before stays with
`OTHER`, which has all that no label has. So the labels' sum is the ledger's total at every reading, no counter falls,
and a reading costs O(labels) and one pass over the accounts. Between readings only admissions cost something.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from heapq import nlargest
from typing import Any

from sglang_fair.core.job import Job
from sglang_fair.core.ledger import OTHERS, SYSTEM, Usage
from sglang_fair.core.queue import FairQueue
from sglang_fair.metrics.labels import OTHER, Labels
from sglang_fair.metrics.table import Histogram

COUNTS = ("extend_tokens", "cached_tokens", "output_tokens", "requests")


@dataclass(slots=True)
class _Counted:
    """A client with a label."""

    before: Usage
    """What the ledger had for it when it got the label."""
    service: float = 0.0


class ReplicaCounts:
    """What one scheduler has to tell. Belongs to its thread."""

    def __init__(self, most: int) -> None:
        """`most` clients that are no tenants have labels (`Labels`)."""
        self._labels = Labels(most)
        self._most = most
        self._clients: dict[str, _Counted] = {}
        self._waits: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._other_service = 0.0

    def arrived(self, job: Job, queue: FairQueue) -> None:
        """A request came. One that tells its client's weight was sent by a gateway with a tenants' file."""
        is_news = job.weight is not None and not job.system and job.client not in self._clients
        if is_news and self._labels.admit(job.client):
            self._follow(job.client, queue)

    def admitted(self, job: Job, waited_s: float) -> None:
        """A request was admitted for the first time, so long after it came."""
        if not job.system:
            self._waits[self._labels.of(job.client)].observe(max(0.0, waited_s))

    def read(self, queue: FairQueue) -> dict[str, Any]:
        """Everything, JSON-ready. Gives labels to those that have earned one since the last reading."""
        ledger = queue.account.ledger
        accounts = ledger.accounts()
        for client in self._clients:
            self._labels.offer(client, ledger.usage(client).service)
        unnamed = (name for name in accounts if name not in self._clients and name not in (SYSTEM, OTHERS))
        for client in nlargest(self._most, unnamed, key=lambda name: accounts[name].service):
            if self._labels.offer(client, accounts[client].service):
                self._follow(client, queue)
        policy, weights = queue.policy, queue.policy.weights
        clients: dict[str, dict[str, Any]] = {}
        for client, counted in self._clients.items():
            usage, presence = ledger.usage(client), queue.presence(client)
            counted.service = max(counted.service, usage.service - counted.before.service)
            clients[client] = {
                **{name: getattr(usage, name) - getattr(counted.before, name) for name in COUNTS},
                "service": counted.service,
                "charged": usage.service + usage.transferred_units,
                "deficit": policy.counter(client),
                "weight": 1.0 if weights is None else weights.of(client),
                "backlog": presence.backlog if presence.waiting else None,
                "waiting": presence.waiting,
                "running": presence.running,
            }
        system = ledger.usage(SYSTEM)
        clients[SYSTEM] = {name: getattr(system, name) for name in COUNTS} | {"service": system.service}
        clients[OTHER] = self._other(queue, clients)
        return {
            "clients": clients,
            "waits": {label: waits.plain() for label, waits in self._waits.items()},
            "books_ok": ledger.ok,
        }

    def _other(self, queue: FairQueue, named: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        total = queue.account.ledger.total
        rest = {name: getattr(total, name) - sum(one[name] for one in named.values()) for name in COUNTS}
        service = total.service - sum(one["service"] for one in named.values())
        self._other_service = max(self._other_service, service)  # sums are rounded, counters must not fall
        return {
            **rest,
            "service": self._other_service,
            "waiting": len(queue) - sum(one.get("waiting", 0) for one in named.values()),
            "running": len(queue.account.running) - sum(one.get("running", 0) for one in named.values()),
        }

    def _follow(self, client: str, queue: FairQueue) -> None:
        ledger = queue.account.ledger
        before = Usage()
        before.add(ledger.usage(client))
        ledger.keep(client)
        self._clients[client] = _Counted(before)
