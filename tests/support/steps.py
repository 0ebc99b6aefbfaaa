"""The rule of steps, driven by clients' names: whatever one does, it does with the next of its requests."""

from collections import defaultdict

from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.steps import Steps


class Clients(Steps):
    """`Steps` of clients whose requests have no names."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._waiting: defaultdict[str, list[Job]] = defaultdict(list)
        self._runs: defaultdict[str, list[Job]] = defaultdict(list)

    def come(self, *clients: str) -> None:
        for client in clients:
            self._waiting[client].append(job := Job("", client))
            self.arrive(job)

    def go(self, client: str) -> None:
        """One that waits is given up."""
        self.leave(self._waiting[client].pop())

    def begin(self, *clients: str) -> None:
        for client in clients:
            self._runs[client].append(job := self._waiting[client].pop())
            self.admit(job)

    def decode(self, *clients: str) -> None:
        self.begin(*clients)
        for client in clients:
            self.computed(self._runs[client][-1])

    def again(self, client: str) -> None:
        """One that runs waits again."""
        self._waiting[client].append(job := self._runs[client].pop())
        self.retract(job)

    def end(self, client: str) -> None:
        self.finish(self._runs[client].pop(), "finished")

    def may(self, client: str) -> bool:
        return self.may_prefill(Job("", client, system=client == SYSTEM))

    def holds(self, client: str) -> bool:
        return self.holds_back(Job("", client))
