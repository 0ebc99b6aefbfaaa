"""What becomes of workers: they come, drain, fall silent, load another model and go, and say what they cache."""

from router.events import (
    MOST_COUNT,
    Cleared,
    Load,
    Refuse,
    Removed,
    Stored,
    Swap,
    WorkerDown,
    WorkerDrain,
    WorkerHealth,
    WorkerUp,
)
from router.flights import Flights, State
from router.swaps import Swaps
from router.workers import Worker

LEAST_TREE_TOKENS = 8_000_000
"""Of a tree whose limit follows what the workers can cache."""


class WorkerEvents:
    """Keeps the table of workers, the tree, the placements and the requests in flight in step. The handlers ignore, and
    count, what is said of a worker that is not up."""

    def __init__(self, state: State, flights: Flights, *, finish_s: float, resizes_tree: bool) -> None:
        """`resizes_tree`: the tree's limit follows the workers' capacity."""
        self._placement = state.placement
        self._workers, self._tree, self._flights, self._suspects = (
            state.workers, state.tree, flights, state.suspects
        )  # fmt: skip
        self._throttling, self._counts, self._resizes_tree = state.throttling, state.counts, resizes_tree
        self._announced: list[Worker] = []
        """The workers that the placement knows to take requests."""
        self.swaps = Swaps(state, flights, finish_s)

    def up(self, event: WorkerUp, now_s: float, peer: bytes) -> None:
        """It is up, or what is known of it has changed. At another address, or with another model, it is a new one."""
        known = self._workers.get(event.worker)
        if known is not None:
            has_same = not event.models or known.up.loaded == event.loaded
            if has_same and (known.up.url, known.up.kv) == (event.url, event.kv):
                self._changed(known, event, now_s)
                return
            self.gone(event.worker, now_s)
        worker = self._workers.add(event)
        self._tree.add_worker(event.worker, has_events=event.kv is not None)
        self._workers.placement_of(worker).worker_up(event.worker, event.capacity)
        self.swaps.up(event.worker, now_s)
        for one in self._workers:  # the first one that names a model says what the others have, too
            self.swaps.equip(one, now_s)
        self._resize()
        self._counts["workers up"] += 1

    def down(self, event: WorkerDown, now_s: float, peer: bytes) -> None:
        """It is gone, with its cache and its requests."""
        if self._known(event.worker, "worker down ignored"):
            self.gone(event.worker, now_s)

    def gone(self, name: str, now_s: float) -> None:
        worker = self._workers.by_name[name]
        self._counts["lost with their worker"] += self._flights.fail_all(worker, now_s)
        self._suspects.leaves(name, is_gone=True)
        self._workers.remove(name)
        self._throttling.worker_gone(name)
        self._workers.placement_of(worker).worker_down(name)
        self._tree.remove_worker(name)
        self.swaps.gone(name, now_s)
        self._resize()
        self._counts["workers down"] += 1

    def drain(self, event: WorkerDrain, now_s: float, peer: bytes) -> None:
        """It gets no new requests, and is gone with the last one that it has."""
        worker = self._known(event.worker, "worker drain ignored")
        if worker is not None:
            self._workers.set_draining(worker, True)
            self._suspects.leaves(event.worker, is_gone=False)
            self.drained(worker, now_s)

    def drained(self, worker: Worker, now_s: float) -> None:
        if worker.draining and not worker.in_flight:
            self.gone(worker.name, now_s)

    def health(self, event: WorkerHealth, now_s: float, peer: bytes) -> None:
        worker = self._known(event.worker, "worker health ignored")
        if worker is not None and self._workers.vote(peer, worker, ok=event.ok):
            self._health_changed(worker)

    def peer_gone(self, peer: bytes, now_s: float) -> None:
        """What `peer` has said of workers holds no more."""
        self.swaps.peer_gone(peer, now_s)
        for worker in self._workers.drop_votes(peer):
            self._health_changed(worker)

    def load(self, event: Load, now_s: float, peer: bytes) -> None:
        """How much it has to do, and the size of its cache."""
        worker = self._known(event.worker, "load ignored")
        if worker is None:
            return
        self._throttling.load(event, now_s)
        if 0 < event.size_tokens <= MOST_COUNT and event.size_tokens != worker.up.kv_tokens:
            worker.change(kv_tokens=event.size_tokens)
            self.swaps.equip(worker, now_s)
            self._resize()

    def stored(self, event: Stored, now_s: float, peer: bytes) -> None:
        worker = self._known(event.worker, "cache event ignored")
        if worker is not None:
            namespace = worker.pool.key(event.namespace)
            self._tree.stored(
                event.worker, event.hashes, event.parent, event.tokens, event.block_tokens, namespace
            )

    def removed(self, event: Removed, now_s: float, peer: bytes) -> None:
        if self._known(event.worker, "cache event ignored"):
            self._tree.removed(event.worker, event.hashes)

    def cleared(self, event: Cleared, now_s: float, peer: bytes) -> None:
        if self._known(event.worker, "cache event ignored"):
            self._tree.clear(event.worker)

    def swap(self, event: Swap, now_s: float) -> Refuse | None:
        """An operator has a worker load another model; None: it has, or will."""
        reason = self.swaps.ask(event.worker, event.model, now_s)
        return None if reason is None else Refuse(event.id, reason, retry=False)

    def announce(self) -> None:
        """Tells the placement which workers take requests, if these are others than before."""
        if self._workers.taking is not self._announced:
            self._announced = self._workers.taking
            self._placement.taking(
                [one.name for one in self._workers if not (one.draining or (one.sick and not one.swapping))]
            )

    def _known(self, name: str, ignored: str) -> Worker | None:
        worker = self._workers.get(name)
        if worker is None:
            self._counts[ignored] += 1
        return worker

    def _changed(self, known: Worker, event: WorkerUp, now_s: float) -> None:
        before = known.up
        known.change(
            models=event.models or before.models,
            replay=event.replay,
            load=event.load,
            listed=event.listed,  # the latest list holds
            capacity=event.capacity,
            kv_tokens=event.kv_tokens or before.kv_tokens,
            chunk_tokens=event.chunk_tokens or before.chunk_tokens,
        )
        self._workers.set_draining(known, False)
        if before.capacity != event.capacity:
            known.pool.placement.worker_changed(event.worker, event.capacity)
        self.swaps.equip(known, now_s)
        self._resize()

    def _resize(self) -> None:
        """The tree evicts nothing before the workers do."""
        if self._resizes_tree:
            self._tree.resize(max(LEAST_TREE_TOKENS, sum(worker.up.kv_tokens for worker in self._workers)))

    def _health_changed(self, worker: Worker) -> None:
        """A worker that did not answer may have restarted: what it caches is learnt anew."""
        self._counts["workers sick" if worker.sick else "workers well"] += 1
        self._tree.clear(worker.name)
