"""One question to the router, over a connection of its own."""

from typing import Any

from router.client import RouterClient, RouterGone
from router.events import Query, Refuse, Snapshot, Swap
from sglang_fair.common.curve import Keys


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
