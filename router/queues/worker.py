"""A worker with its queue, and the window of tokens that it may have in flight.

window    prompt + expected output of what was sent and is not over; of a prefix that several share, once; and by how
          much answers are already longer than expected, as far as that is reported
room      for a request of tier 1 while that is below the KV cache. For one of tier 0 while it is below the KV cache
          and one prefill chunk: so whoever is ahead of its share never fills the last chunk, and who is within its
          share is at the worker at once, where the worker's own policy puts it first
eviction  a worker that `evicts` takes requests back for more urgent ones (`core.preemption`). So what is in flight and
          due `LATER_S` or more after a request of tier 0 does not count against that one
beyond    a client that has little there does not wait here for those who have much: its requests of tier 0 may go up
          to half of its part of the KV cache, whatever the window, until twice the KV cache is in flight. The worker's
          policy puts it first. Ten thousand names have parts below any request. Without tiers nobody goes beyond
fresh     it has just loaded a model and has served nobody of it. It keeps the model until it has, or nobody in its
          queue needs it; else a plan that was made while it loaded would have it load another one, without end
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from math import inf

from router.queues.group import Group
from router.queues.heads import Heads

LATER_S = 10.0
"""Deadlines that differ by so much tell who may be taken back for whom."""


@dataclass(slots=True)
class Worker:
    """`swap_s`: the models that it can load and how long that takes, the loaded one too; empty: it keeps that."""

    name: str
    loaded: str | None
    kv_tokens: int
    chunk_tokens: int = 8_192
    swap_s: Mapping[str, float] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)
    """Its queue. Only `Standing` writes it."""
    heads: Heads[Group] = field(default_factory=Heads)
    """Those of them that somebody waits in."""
    in_flight: dict[str, float] = field(default_factory=dict)
    """Tokens that each request that was sent may take, without a prefix that it may share."""
    in_flight_tokens: float = 0.0
    overrun_tokens: int = 0
    """By how much answers in flight are longer than expected."""
    is_open: bool = True
    """It takes requests."""
    is_fresh: bool = False
    stays: bool = False
    """It serves its model before it loads what its queue has next (`staying`)."""
    stays_until_s: float = -inf
    """Until when that holds."""
    sends: int = 0
    """Requests that were sent there."""
    pulls: int = 0
    """Requests that it has got from queues."""
    first_token_s: float = 0.0
    """From a request's way there to its first token, as measured last."""
    evicts: bool = False
    """It takes requests back for more urgent ones."""
    clients: dict[str, float] = field(default_factory=dict)
    """Tokens in flight by client."""
    _owners: dict[str, tuple[str, float]] = field(default_factory=dict)
    """By request in flight, its client and its tokens, with a prefix that it may share."""
    _dues: dict[str, int] = field(default_factory=dict)
    """By request in flight, when it is due, in steps of `LATER_S`."""
    _due_tokens: dict[int, float] = field(default_factory=dict)
    """In flight, by these."""
    _prefixes: dict[str, Hashable] = field(default_factory=dict)
    """By request in flight."""
    _shared: dict[Hashable, tuple[int, int]] = field(default_factory=dict)
    """Prefix -> how many in flight have it, and its tokens."""

    def can_serve(self, group: Group) -> bool:
        """Whether it may stand in this queue."""
        kind = group.kind
        has_model = kind.model == self.loaded or kind.model in self.swap_s
        may = has_model and self.is_open and self.name not in kind.exclude
        return may and group.begun_on in (None, self.name)

    def has_room(self, tier: int, due_s: float | None = None) -> bool:
        """Whether a request of this tier may be sent there, which is due at `due_s` if that is said."""
        if self.held_tokens < self.kv_tokens + (0 if tier else self.chunk_tokens):
            return True
        if tier or not self.evicts or due_s is None:
            return False
        last = int(due_s // LATER_S) + 1
        later = sum(tokens for due, tokens in self._due_tokens.items() if due > last)
        return self.held_tokens - later < self.kv_tokens

    def is_small(self, client: str, tokens: float) -> bool:
        """Whether a request of tier 0 and so many tokens may be sent there beyond the window. O(1)."""
        mine = self.clients.get(client, 0.0)
        count = len(self.clients) + (not mine)
        return mine + tokens <= self.kv_tokens / (2 * count) and self.held_tokens < 2 * self.kv_tokens

    @property
    def held_tokens(self) -> float:
        """What the window counts."""
        return self.in_flight_tokens + self.overrun_tokens

    @property
    def is_full(self) -> bool:
        """It pulls nothing more of those ahead of their share. What it does while it is full is what rates are learnt
        from."""
        return self.held_tokens >= self.kv_tokens

    @property
    def free_tokens(self) -> float:
        """Of the KV cache, promised to nobody."""
        return max(0.0, self.kv_tokens - self.held_tokens)

    def send(
        self,
        request_id: str,
        tokens: float,
        prefix: Hashable | None,
        prefix_tokens: int,
        due_s: float | None = None,
        client: str = "",
    ) -> None:
        """A request is in flight there that may take so many tokens, of which it may share the prefix, and is due then.
        Nothing happens if it is already."""
        if request_id in self.in_flight:
            return
        self.sends += 1
        self._owners[request_id] = client, tokens
        self.clients[client] = self.clients.get(client, 0.0) + tokens
        if prefix is not None:
            count, known = self._shared.get(prefix, (0, prefix_tokens))
            tokens -= min(prefix_tokens, known)
            if not count:
                self.in_flight_tokens += known
            self._shared[prefix] = count + 1, known
            self._prefixes[request_id] = prefix
        self.in_flight[request_id] = tokens
        self.in_flight_tokens += tokens
        if self.evicts and due_s is not None:
            due = self._dues[request_id] = int(due_s // LATER_S)
            self._due_tokens[due] = self._due_tokens.get(due, 0.0) + tokens

    def land(self, request_id: str) -> None:
        """It is in flight no more, if it was."""
        tokens = self.in_flight.pop(request_id, None)
        if tokens is None:
            return
        self.in_flight_tokens -= tokens
        client, own = self._owners.pop(request_id)
        if (left := self.clients.pop(client) - own) > 0.5:
            self.clients[client] = left
        due = self._dues.pop(request_id, None)
        if due is not None and (due_tokens := self._due_tokens.pop(due) - tokens) > 0.5:
            self._due_tokens[due] = due_tokens
        prefix = self._prefixes.pop(request_id, None)
        if prefix is not None:
            count, shared = self._shared.pop(prefix)
            if count > 1:
                self._shared[prefix] = count - 1, shared
            else:
                self.in_flight_tokens -= shared
        if not self.in_flight:  # drop what rounding has left over
            self.in_flight_tokens = 0.0
            self._due_tokens.clear()
            self.clients.clear()
