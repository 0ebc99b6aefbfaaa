"""What is in flight at a worker, in tokens, for placements that send no more than it has room for. A request is counted
with its prompt and its expected answer."""

from dataclasses import dataclass, field

from router.placement.contract import WorkerView

RECOMPUTED = 4.0
"""A prompt token that is not cached at a worker, in tokens that wait there: computing it again is lost to all. Chosen
among 1, 4 and 16 by the throughput of simulated trees and judges (one seed)."""
OUTPUT_PRICE = 2.0
LATER_S, DUE_S = 120.0, 10.0
"""What is due so much later may be taken back for an urgent request; in steps of `DUE_S`."""


@dataclass(slots=True)
class InFlight:
    """All of it, by client, and by when it is due."""

    tokens: float = 0.0
    clients: dict[str, float] = field(default_factory=dict)
    _dues: dict[int, float] = field(default_factory=dict)

    def add(self, client: str, tokens: float, due_s: float) -> None:
        """A request was sent there."""
        self.tokens += tokens
        self.clients[client] = self.clients.get(client, 0.0) + tokens
        due = int(due_s // DUE_S)
        self._dues[due] = self._dues.get(due, 0.0) + tokens

    def remove(self, client: str, tokens: float, due_s: float) -> None:
        """It is over."""
        self.tokens -= tokens
        if (left := self.clients.pop(client) - tokens) > 0.5:
            self.clients[client] = left
        due = int(due_s // DUE_S)
        if (left := self._dues.pop(due) - tokens) > 0.5:
            self._dues[due] = left
        if not self.clients:  # what rounding has left over goes
            self.tokens = 0.0
            self._dues.clear()

    def later(self, due_s: float) -> float:
        """Tokens that may be taken back for a request that is due at `due_s`."""
        step = (due_s + LATER_S) / DUE_S
        return sum(tokens for due, tokens in self._dues.items() if due >= step)

    def is_small(self, client: str, tokens: float, kv_tokens: float) -> bool:
        """Whether a request of so many tokens leaves its client at most half of its part of a cache of `kv_tokens`.
        Ten thousand names have parts below any request. O(1)."""
        mine = self.clients.get(client, 0.0)
        count = len(self.clients) + (not mine)
        return mine + tokens <= kv_tokens / (2 * count)


def left_to_do(view: WorkerView, uncached_tokens: float) -> float:
    """At a worker, with a request of which so many tokens are not cached there: in tokens, by its capacity."""
    left = RECOMPUTED * uncached_tokens + view.prefill_tokens + OUTPUT_PRICE * view.decode_tokens
    return left / view.capacity
