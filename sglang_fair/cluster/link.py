"""The supervisor's connection to the router: asks whether it answers, and reports replicas that die and return."""

from typing import Any

from router.client import RouterClient, RouterGone
from router.events import Query, Refuse, Snapshot, Swap, WorkerDown, WorkerDrain, WorkerUp
from sglang_fair.common.curve import Keys


class RouterLink(RouterClient):
    """Tells a router about its workers. Messages sent while it is down reach its successor, in order. Connects when it
    is made."""

    def __init__(self, endpoint: str, keys: Keys | None = None) -> None:
        super().__init__(endpoint, keys, beats=False)
        self.start()

    def up(self, worker: WorkerUp) -> None:
        """`worker` serves again, with an empty cache."""
        self.tell(worker)

    def down(self, worker: WorkerUp) -> None:
        """`worker` is gone."""
        self.tell(WorkerDown(worker.worker))

    def drain(self, worker: WorkerUp) -> None:
        """`worker` must get no new requests; it is gone when it has none left."""
        self.tell(WorkerDrain(worker.worker))


async def router_answer(
    endpoint: str, question: Query | Swap, timeout_s: float = 1.0, keys: Keys | None = None
) -> Snapshot | Refuse | None:
    """What the router at `endpoint` answers, None if it does not in time. With `keys` it must have its own."""
    async with RouterClient(endpoint, keys, beats=False) as client:
        try:
            answer: Snapshot | Refuse = await client.ask(question, (Snapshot, Refuse), timeout_s)
        except RouterGone:
            return None
        return answer


async def router_state(
    endpoint: str, part: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """A part of the router's snapshot: its workers by name, how far they are with loading another model (swaps), its
    queues. Empty if it has no such part, None if it does not answer in time."""
    answer = await router_answer(endpoint, Query(""), timeout_s, keys)
    if not isinstance(answer, Snapshot):
        return None
    found = answer.state.get(part)
    return found if isinstance(found, dict) else {}
