"""What is in flight at a worker, in tokens, for placements that send no more than it has room for. A request is counted
with its prompt and its expected answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from router.placement.contract import Equipment, Request, WorkerView, least
from router.radix import Match

RECOMPUTED = 4.0
"""A prompt token that is not cached at a worker, in tokens that wait there: computing it again is lost to all. Chosen
among 1, 4 and 16 by the throughput of simulated trees and judges (one seed)."""
OUTPUT_PRICE = 2.0
LATER_S, DUE_S = 120.0, 10.0
"""What is due so much later may be taken back for an urgent request; in steps of `DUE_S`."""


@dataclass(slots=True, eq=False)
class Window:
    """A worker, what it has loaded and may hold, and what is in flight there: all of it, by client, and by when it is
    due. `swap_s`: the models that it can load, the loaded one too, and how long that takes; empty: it keeps that.
    `evicts`: it takes requests back for more urgent ones (policy `slo`)."""

    name: str
    loaded: str | None
    kv_tokens: int
    chunk_tokens: int = 8_192
    swap_s: Mapping[str, float] = field(default_factory=dict)
    evicts: bool = False
    takes: bool = True
    """It takes requests."""
    tokens: float = 0.0
    clients: dict[str, float] = field(default_factory=dict)
    _dues: dict[int, float] = field(default_factory=dict)

    @property
    def held(self) -> float:
        """Tokens, with those by which answers are already longer than was expected."""
        raise NotImplementedError

    def equip(self, has: Equipment) -> None:
        """It has this from now on, but for the model."""
        self.kv_tokens = has.kv_tokens or self.kv_tokens
        self.chunk_tokens = self.chunk_tokens if has.chunk_tokens is None else has.chunk_tokens
        self.swap_s = has.swap_s

    def has_room(self, due_s: float | None = None, *, tier: int = 0) -> bool:
        """Whether a request may be sent there, which is due at `due_s` and in time if that is said: for tier 1 below
        the KV cache, for tier 0 a prefill chunk more. What is due much later than one in time does not count against it
        where it can be taken back."""
        held = self.held
        if held < self.kv_tokens + (0 if tier else self.chunk_tokens):
            return True
        return self.evicts and due_s is not None and held - self._later(due_s) < self.kv_tokens

    def is_small(self, client: str, tokens: float) -> bool:
        """Whether a request of so many tokens leaves its client at most half of its part of the KV cache, of which
        twice as much may be held so. Ten thousand names have parts below any request. O(1)."""
        mine = self.clients.get(client, 0.0)
        count = len(self.clients) + (not mine)
        return mine + tokens <= self.kv_tokens / (2 * count) and self.held < 2 * self.kv_tokens

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

    def _later(self, due_s: float) -> float:
        step = (due_s + LATER_S) / DUE_S
        return sum(tokens for due, tokens in self._dues.items() if due >= step)


def least_to_do(request: Request, match: Match, views: Sequence[WorkerView]) -> str | None:
    """The worker that would be done with `request` first, by its capacity; None if there is none."""
    prompt, held = request.input_tokens, match.of
    costs = [
        (RECOMPUTED * (prompt - held(view.name)) + view.prefill_tokens + OUTPUT_PRICE * view.decode_tokens)
        / view.capacity
        for view in views
    ]
    return least(views, costs).name if views else None
