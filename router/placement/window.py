"""What is in flight at a worker, in tokens, for placements that send no more than it has room for. A request is counted
with its prompt and its expected answer."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class InFlight:
    """All of it, by client, and by when it is due, in steps that the placement chooses."""

    tokens: float = 0.0
    clients: dict[str, float] = field(default_factory=dict)
    _dues: dict[int, float] = field(default_factory=dict)

    def add(self, client: str, tokens: float, due: int | None = None) -> None:
        """A request was sent there, which is due in step `due` if that is said."""
        self.tokens += tokens
        self.clients[client] = self.clients.get(client, 0.0) + tokens
        if due is not None:
            self._dues[due] = self._dues.get(due, 0.0) + tokens

    def remove(self, client: str, tokens: float, due: int | None = None) -> None:
        """It is over."""
        self.tokens -= tokens
        if (left := self.clients.pop(client) - tokens) > 0.5:
            self.clients[client] = left
        if due is not None and (left := self._dues.pop(due) - tokens) > 0.5:
            self._dues[due] = left

    def clear(self) -> None:
        """Nothing is in flight: what rounding has left over goes."""
        self.tokens = 0.0
        self.clients.clear()
        self._dues.clear()

    def due_from(self, step: float) -> float:
        """Tokens that are due in this step or later."""
        return sum(tokens for due, tokens in self._dues.items() if due >= step)

    def is_small(self, client: str, tokens: float, kv_tokens: float) -> bool:
        """Whether a request of so many tokens leaves its client at most half of its part of a cache of `kv_tokens`.
        Ten thousand names have parts below any request. O(1)."""
        mine = self.clients.get(client, 0.0)
        count = len(self.clients) + (not mine)
        return mine + tokens <= kv_tokens / (2 * count)
