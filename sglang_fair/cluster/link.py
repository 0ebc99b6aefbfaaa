"""The supervisor's connection to the router: asks whether it answers, and reports replicas that die and return."""

from typing import Any

from router.client import RouterClient, RouterGone
from router.events import Query, Refuse, Snapshot, Swap, WorkerDown, WorkerDrain, WorkerUp
from sglang_fair.cluster.plan import Worker
from sglang_fair.common.curve import Keys


class RouterLink(RouterClient):
    """Messages sent while the router is down reach its successor, in order. Connects when it is made."""

    def __init__(self, endpoint: str, keys: Keys | None = None) -> None:
        super().__init__(endpoint, keys, beats=False)
        self.start()

    def up(self, worker: Worker) -> None:
        """`worker` serves again, with an empty cache."""
        models = worker.models or ((worker.model,) if worker.model else ())
        self.tell(
            WorkerUp(
                worker.name,
                worker.url,
                worker.kv,
                worker.replay,
                load=worker.load,
                models=models,
                loaded="" if worker.models else worker.model,
            )
        )

    def down(self, worker: Worker) -> None:
        """`worker` is gone."""
        self.tell(WorkerDown(worker.name))

    def drain(self, worker: Worker) -> None:
        """`worker` must get no new requests; it is gone when it has none left."""
        self.tell(WorkerDrain(worker.name))


async def router_workers(
    endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """The workers in the answer of the router at `endpoint`, by name. None if it does not answer in time. With `keys`,
    here and below, it must have its own."""
    return await _part("workers", endpoint, timeout_s, keys)


async def router_swaps(
    endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """How far each worker is with loading another model, by name. None if the router does not answer in time."""
    return await _part("swaps", endpoint, timeout_s, keys)


async def router_shortage(
    endpoint: str, timeout_s: float = 1.0, keys: Keys | None = None
) -> dict[str, Any] | None:
    """What the queues of the router at `endpoint` say is missing; None if nothing is, or it does not answer."""
    shortage = (await _part("queues", endpoint, timeout_s, keys) or {}).get("shortage")
    return shortage if isinstance(shortage, dict) else None


async def router_asked(
    endpoint: str, question: Query | Swap, timeout_s: float = 1.0, keys: Keys | None = None
) -> Snapshot | Refuse | None:
    """What the router at `endpoint` answers. None if it does not in time."""
    async with RouterClient(endpoint, keys, beats=False) as client:
        try:
            answer: Snapshot | Refuse = await client.ask(question, (Snapshot, Refuse), timeout_s)
        except RouterGone:
            return None
        return answer


async def _part(name: str, endpoint: str, timeout_s: float, keys: Keys | None) -> dict[str, Any] | None:
    answer = await router_asked(endpoint, Query(""), timeout_s, keys)
    if not isinstance(answer, Snapshot):
        return None
    found = answer.state.get(name)
    return found if isinstance(found, dict) else {}
