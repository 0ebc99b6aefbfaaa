"""What feeders say of the batches that they have, for `/status` and metrics. A feeder that is gone has none."""

from collections.abc import Iterator

from router.events import Backlog, BacklogRow

LISTED_ROWS = 50


class Backlogs:
    """By peer. One feeder is enough, but while one is replaced there may be two."""

    def __init__(self) -> None:
        self._told: dict[bytes, Backlog] = {}

    def told(self, peer: bytes, backlog: Backlog) -> None:
        """In place of what it said before."""
        self._told[peer] = backlog

    def gone(self, peer: bytes) -> bool:
        """Whether it was a feeder."""
        return self._told.pop(peer, None) is not None

    def rows(self) -> Iterator[tuple[bytes, BacklogRow]]:
        """All of them, each with the peer that has its items."""
        for peer, backlog in self._told.items():
            yield from ((peer, row) for row in backlog.rows)

    def state(self) -> dict[str, object]:
        """As `/status` shows it."""
        rows = [row for _, row in self.rows()]
        return {
            "feeders": len(self._told),
            "rows": len(rows),
            "waiting": sum(row.waiting for row in rows),
            "running": sum(row.running for row in rows),
            "groups": [
                {
                    "client": row.client,
                    "model": row.model,
                    "class": row.due.slo_class,
                    "due_in_s": round(row.due.left_s),
                    "waiting": row.waiting,
                    "running": row.running,
                }
                for row in rows[:LISTED_ROWS]
            ],
            "clients": {
                one.client: {"left": one.left, "completed": one.completed, "failed": one.failed}
                for backlog in self._told.values()
                for one in backlog.clients
            },
        }
