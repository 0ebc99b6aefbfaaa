"""Items of batches, asked for when a worker has room for them: what the core does with the stand-ins of
`queues.backlog`, for placements that hold requests in queues with deadlines.
"""

from collections.abc import Callable, Sequence

from router.events import Action, Backlog, Pull
from router.placement.contract import Ended, Holding, Placement, Request
from router.queues.backlog import Row, Rows, StandIn
from router.radix import Match
from router.workers import Pool, Worker


class Pulling:
    """Belongs to the router's core."""

    def __init__(
        self,
        placement: Placement,
        holding: Holding,
        pool: Callable[[str], Pool],
        may_come: Callable[[str], bool],
        nothing: Callable[[], Match],
    ) -> None:
        """`pool` is that of a model, `may_come` whether a worker is about to get it, `nothing` what a prompt matches
        that nobody has cached."""
        self._placement, self._holding = placement, holding
        self._pool, self._may_come, self._nothing = pool, may_come, nothing
        self._rows = Rows()
        self._requests: dict[str, Request] = {}
        self._peers: set[bytes] = set()
        self._is_changed = False
        self.counts = {"items pulled": 0, "pulled items that did not come": 0}

    @property
    def waiting(self) -> int:
        """Stand-ins that wait in queues."""
        return self._rows.waiting

    def told(self, peer: bytes, backlog: Backlog, now_s: float) -> None:
        """What a feeder has, if it can be asked."""
        if not backlog.may_pull:
            self.gone(peer)
            return
        self._peers.add(peer)
        rows = [
            Row(
                row.group,
                row.client,
                row.model,
                row.waiting,
                row.prompt_tokens,
                row.output_tokens,
                row.due.promise(now_s),
            )
            for row in backlog.rows
        ]
        for name in self._rows.told(peer, rows):
            self._give_up(name)
        self._is_changed = True

    def gone(self, peer: bytes) -> None:
        """A feeder is not there any more."""
        if peer in self._peers:
            self._peers.discard(peer)
            for name in self._rows.told(peer, ()):
                self._give_up(name)

    def after(self, now_s: float) -> list[Action]:
        """What is to be done after each event: lost items are given up, and rows get their stand-ins."""
        for name in self._rows.overdue(now_s):
            self.counts["pulled items that did not come"] += 1
            self._end(name, now_s)
        actions: list[Action] = []
        while self._is_changed:
            self._is_changed = False
            self._give_up_unserved()
            for made in self._rows.lacking():
                if not self._serves(made.row.model):
                    self._rows.left(made.id)
                    continue
                request = self._requests[made.id] = _request(made)
                taking = self._pool(made.row.model).taking
                worker = self._placement.place(request, self._nothing(), taking, now_s)
                if worker is not None:
                    actions.append(self.pulled(request, worker, now_s))
        return actions

    def is_stand_in(self, name: str) -> bool:
        """Whether it waits for an item."""
        return self._rows.waits(name)

    def pulled(self, request: Request, worker: str, now_s: float) -> Action:
        """A worker gets a stand-in: its feeder is asked for an item."""
        self._is_changed = True
        self._placement.placed(request, worker, self._nothing(), now_s)
        self.counts["items pulled"] += 1
        peer, group = self._rows.pull(request.id, worker, now_s)
        return peer, Pull(request.id, group)

    def come(self, name: str, taking: Sequence[Worker], now_s: float) -> Worker | None:
        """The worker that has kept room for the item that has come, if it is one of `taking`."""
        found = self._end(name, now_s)
        return next((worker for worker in taking if worker.name == found), None)

    def worker_gone(self, worker: str, now_s: float) -> None:
        """Before its placement is told."""
        for name in self._rows.at(worker):
            self._end(name, now_s)
        self._is_changed = True

    def workers_changed(self) -> None:
        """Models may be served that were not, and the other way round."""
        self._is_changed = True

    def state(self) -> dict[str, int]:
        """For `/status`."""
        return {"stand_ins": self._rows.waiting, "asked": self._rows.asked, **self.counts}

    def _give_up_unserved(self) -> None:
        """Stand-ins of models that nobody has or will have."""
        for model in self._rows.models():
            if not self._serves(model):
                for name in self._rows.of(model):
                    self._rows.left(name)
                    self._give_up(name)

    def _serves(self, model: str) -> bool:
        return bool(self._pool(model).taking) or self._may_come(model)

    def _end(self, name: str, now_s: float) -> str | None:
        """The room that is kept for a stand-in is free again; whose it was."""
        found = self._rows.come(name)
        if found is None:
            return None
        ended = Ended(self._requests.pop(name), found.worker, 0, 0, "failed")
        self._placement.done(ended, now_s)
        self._is_changed = True
        return found.worker

    def _give_up(self, name: str) -> None:
        self._holding.give_up(self._requests.pop(name))


def _request(made: StandIn) -> Request:
    row = made.row
    return Request(
        id=made.id,
        client=row.client,
        tokens=b"",
        input_tokens=max(1, round(row.prompt_tokens)),
        max_output_tokens=max(1, round(row.output_tokens)),
        expected_output_tokens=row.output_tokens,
        namespace=made.id,
        model=row.model,
        promise=row.promise,
    )
