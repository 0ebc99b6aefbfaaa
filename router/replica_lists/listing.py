"""Which replicas a source lists, and which events that means for the router. Pure.

Rule. A replica that appears is probed, and comes up once it is ready. One that vanishes is drained: it gets no new
requests, finishes those that it has, and is forgotten. One that comes back is probed again. A replica at another
address, or with another model, is another one, whatever its name.

A router that is started again learns from gateways which replicas it had. Those that this list named then, and names no
longer, are drained too: so each replica that is up has its list's name (`listed`).
"""

from collections.abc import Iterable

import msgspec

from router.events import WorkerDrain, Workers, WorkerUp


class Listing:
    """State and decisions, no I/O. `name` is the list's."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._has_found = False
        self._listed: dict[str, WorkerUp] = {}
        self._told: dict[str, WorkerUp] = {}

    def found(self, ups: Iterable[WorkerUp]) -> list[WorkerUp | WorkerDrain]:
        """The source lists these replicas, and no others."""
        self._has_found = True
        self._listed = {up.worker: msgspec.structs.replace(up, listed=self._name) for up in ups}
        events: list[WorkerUp | WorkerDrain] = []
        for name, told in list(self._told.items()):
            listed = self._listed.get(name)
            if listed is None or _identity(listed) != _identity(told):
                del self._told[name]
                events.append(WorkerDrain(name))
            elif listed != told:
                self._told[name] = listed
                events.append(listed)
        return events

    def waiting(self) -> list[WorkerUp]:
        """Those that are listed and were not ready yet."""
        return [up for name, up in self._listed.items() if name not in self._told]

    def ready(self, up: WorkerUp) -> list[WorkerUp | WorkerDrain]:
        """`up`, which waited, is ready. Nothing, if it is not listed so any more."""
        if self._listed.get(up.worker) != up or up.worker in self._told:
            return []
        self._told[up.worker] = up
        return [up]

    def lost(self, workers: Workers) -> list[WorkerUp | WorkerDrain]:
        """The router has these workers: it drains those that the list named before it was started, and does not now."""
        mine = [up for up in workers.workers if up.listed == self._name and up.worker not in workers.draining]
        return [WorkerDrain(up.worker) for up in mine if self._has_found and not self._lists(up)]

    def _lists(self, up: WorkerUp) -> bool:
        """A list may leave open which model a replica has; the router learns that."""
        listed = self._listed.get(up.worker)
        return listed is not None and _identity(listed) in (_identity(up), (up.url, up.kv, ""))

    def __len__(self) -> int:
        return len(self._listed)


def _identity(up: WorkerUp) -> tuple[str, str | None, str]:
    return up.url, up.kv, up.loaded
