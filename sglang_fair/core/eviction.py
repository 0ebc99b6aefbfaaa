"""Which part of a prefix cache is evicted next: the least recently used, or fair among clients. Our own rule.

A cache is a tree of *pieces*, runs of tokens; only a free leaf can be evicted. A client *claims* every piece on the
path of a request of its that is served. A piece that k clients claim belongs to each of them in part: a k-th of its
tokens, with the k of that client's last use. A client *holds* the sum of its parts; its *height* is what it holds over
its weight, and the *level* is `1 - SLACK` times the greatest height. `FairEviction` frees space in this order:

    1. what no client claims, the least recently used first: it is free for all
    2. what only clients above the level claim, the least recently used first
    3. if nothing of that is free, the same with half the level, and so on: what can be freed is freed

A claim lapses when clients *below the level* have stored their share of the capacity since its last use, by weight, or
all clients `MEMORY` times the capacity. Ages are counted in tokens, so that all ranks of a replica decide alike.

Bound: if all clients hold H tokens and their weights add up to W, step 2 takes nothing that a client claims which holds
at most (1 - SLACK) H w / W. H and W are those of the last reading of the level. Clients without cached tokens do not
affect the threshold. Proof, and what it is worth: docs/policies.md, "The cache".

A piece costs O(log n), reading the heights O(clients).
"""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from sglang_fair.common.weights import Weights
from sglang_fair.core.heap import LazyHeap

SLACK = 0.125
"""How far below the greatest height the level lies. It keeps two clients of about the same height from taking turns
at being the greatest, and lets recency decide between them."""

MEMORY = 8.0
"""A claim lapses when the cache has stored so many times its capacity since its last use, for any client."""

REFRESH = 1 / 64
"""The level is computed anew when so much of the capacity has been stored."""

MAX_CLAIMS = 64
"""Claims on one piece: those of the clients that used it last. Without this, names that all use one cached prompt would
fill the memory: that stores nothing, so no claim lapses."""

MOMENTS = 4096
"""Last uses are told apart by so many parts of the capacity that were stored between them."""


class Piece:
    """A run of tokens in a cache, as the rule knows it. A tree's own node derives from it."""

    __slots__ = ("claims", "leaves", "used")

    def __init__(self) -> None:
        self.used = 0.0
        """When it was last used, by the tree's own clock: greater is later."""
        self.leaves: LeafOrder | None = None
        """The order of leaves that it is in."""
        self.claims: dict[_Holder, _Claim] = NO_CLAIMS
        """The latest use last."""

    @property
    def size(self) -> int:
        """Its tokens."""
        raise NotImplementedError

    @property
    def free(self) -> bool:
        """Whether it may be evicted: it is a leaf of its tree, and no request has it locked."""
        raise NotImplementedError


LeafOrder: TypeAlias = LazyHeap[Piece]
"""Leaves by last use as it was when they were put here. What has changed since is seen when one comes first."""


class LeastRecentlyUsed:
    """Plain LRU. The tree calls `add` when a piece has become a free leaf, and `take` to evict one."""

    fair = False
    """Whether `use` makes a difference."""

    def __init__(self) -> None:
        self._leaves: LeafOrder = LazyHeap()
        self._added = 0

    def add(self, piece: Piece) -> None:
        """`piece` has become a free leaf. It may be known already."""
        if piece.leaves is None:
            self._put(piece, self._leaves)

    def take(self) -> Piece | None:
        """The leaf that is evicted now; None if none is free. It is forgotten: the caller removes it."""
        piece = self._oldest(self._leaves)
        if piece is not None:
            self.forget(piece)
        return piece

    def use(self, client: str | None, pieces: Iterable[Piece], stored: int = 0) -> None:
        """A request of `client` is served with this path, of which `stored` tokens are new. None: the server's own."""

    def divided(self, upper: Piece, lower: Piece) -> None:
        """`lower` has been divided: `upper`, which is new, is its first part now."""

    def joined(self, upper: Piece, lower: Piece) -> None:
        """`lower` begins with `upper` now, which is gone. The same clients claimed both."""
        self.forget(upper)

    def forget(self, piece: Piece) -> None:
        """`piece` has left the tree."""
        if piece.leaves is not None:
            piece.leaves.discard(piece)
            piece.leaves = None

    def _put(self, piece: Piece, leaves: LeafOrder) -> None:
        self._added += 1
        piece.leaves = leaves
        leaves.put(piece, (piece.used, self._added))

    def _oldest(self, leaves: LeafOrder) -> Piece | None:
        """The least recently used one of `leaves` that is free. It stays there."""
        while (piece := leaves.first()) is not None:
            if not piece.free:
                leaves.discard(piece)
                piece.leaves = None
            elif piece.used > leaves.key(piece)[0]:
                self._put(piece, leaves)
            else:
                return piece
        return None


class _Holder:
    """A client that claims something."""

    __slots__ = ("claims", "client", "held", "leaves", "weight")

    def __init__(self, client: str, weight: float) -> None:
        self.client = client
        self.weight = weight
        self.held = 0.0
        """Tokens: its parts of what it claims."""
        self.claims = 0
        self.leaves: LeafOrder = LazyHeap()
        """Free leaves that it claims. One that others claim as well is in one of their orders."""

    @property
    def height(self) -> float:
        return self.held / self.weight


class _Moment:
    """When something was last used: what all clients had stored by then, and those below the level."""

    __slots__ = ("claims", "stored", "stored_below")

    def __init__(self, stored: int, stored_below: int) -> None:
        self.stored = stored
        self.stored_below = stored_below
        self.claims: dict[_Claim, None] = {}
        """Those whose last use was then."""


class _Claim:
    """What a client has of a piece."""

    __slots__ = ("holder", "moment", "part", "piece")

    def __init__(self, holder: _Holder, piece: Piece, part: float, moment: _Moment) -> None:
        self.holder = holder
        self.piece = piece
        self.part = part
        """Tokens."""
        self.moment = moment
        moment.claims[self] = None
        piece.claims[holder] = self
        holder.held += part
        holder.claims += 1


NO_CLAIMS: dict[_Holder, _Claim] = {}
"""Shared by all pieces that no client claims. Never written to."""


class FairEviction(LeastRecentlyUsed):
    """Fair among clients. `capacity` is what the cache can hold, in tokens."""

    fair = True

    def __init__(self, capacity: int, weights: Weights | None = None) -> None:
        super().__init__()
        self._weights = weights or Weights()
        self._capacity, self._memory = capacity, MEMORY * capacity
        self._lately = float(capacity)
        """The share of the clients below the level, tokens."""
        self._refresh, self._between = REFRESH * capacity, capacity / MOMENTS
        self._stored = self._stored_below = 0
        self._holders: dict[str, _Holder] = {}
        self._moments: deque[_Moment] = deque([_Moment(0, 0)])
        """Oldest first. The last one is now."""
        self._level = self._fair_level = 0.0
        """The second one until no client above that has a free leaf, and again when one has."""
        self._valid_until = 0.0
        """The level is computed anew when so much has been stored."""
        self._above: LazyHeap[_Holder] = LazyHeap()
        """Those above the level that may have a free leaf, by last use of their oldest."""

    def held(self) -> Mapping[str, float]:
        """What each client that claims something holds, tokens."""
        return {client: holder.held for client, holder in self._holders.items()}

    def follow(self, weights: Weights) -> None:
        """The clients' weights are these from now on. O(clients)."""
        self._weights = weights
        for client in self._holders:
            self.reweigh(client)

    def reweigh(self, client: str) -> None:
        """The weight of `client` has changed. O(1); the level is computed anew when it is needed."""
        holder = self._holders.get(client)
        if holder is not None and holder.weight != (weight := self._weights.of(client)):
            holder.weight = weight
            self._valid_until = 0.0

    def add(self, piece: Piece) -> None:
        if piece.leaves is None:
            self._list(piece)

    def use(self, client: str | None, pieces: Iterable[Piece], stored: int = 0) -> None:
        self._stored += stored
        if client is None:
            return
        self._lapse()
        holder = self._holders.get(client)
        if holder is None:
            holder = self._holders[client] = _Holder(client, self._weights.of(client))
        if (holder.held + stored) / holder.weight <= self._fair_level:
            self._stored_below += stored
        now = self._moments[-1]
        if self._stored - now.stored > self._between:
            now = _Moment(self._stored, self._stored_below)
            self._moments.append(now)
        for piece in pieces:
            if piece.claims is NO_CLAIMS:
                piece.claims = {}
            claim = piece.claims.get(holder)
            if claim is None:
                while len(piece.claims) >= MAX_CLAIMS:
                    self._lose(next(iter(piece.claims.values())))
                _Claim(holder, piece, piece.size / (len(piece.claims) + 1), now)
                if piece.leaves is self._leaves:
                    self._move(piece)
                continue
            part = piece.size / len(piece.claims)
            holder.held += part - claim.part
            claim.part = part
            piece.claims[holder] = piece.claims.pop(holder)  # the last one is the latest
            if claim.moment is not now:
                del claim.moment.claims[claim]
                claim.moment = now
                now.claims[claim] = None
        if not holder.claims:
            del self._holders[client]

    def divided(self, upper: Piece, lower: Piece) -> None:
        if not lower.claims:
            return
        upper.claims = {}
        part = upper.size / (upper.size + lower.size)
        for holder, claim in lower.claims.items():
            above = claim.part * part
            claim.part -= above
            holder.held -= above
            _Claim(holder, upper, above, claim.moment)

    def joined(self, upper: Piece, lower: Piece) -> None:
        for holder, claim in list(upper.claims.items()):
            joined = lower.claims[holder]
            holder.held += claim.part
            joined.part += claim.part
            if claim.moment.stored > joined.moment.stored:
                del joined.moment.claims[joined]
                joined.moment = claim.moment
                claim.moment.claims[joined] = None
        self.forget(upper)

    def take(self) -> Piece | None:
        piece = self._choose()
        if piece is not None:
            self.forget(piece)
        return piece

    def forget(self, piece: Piece) -> None:
        super().forget(piece)
        for claim in list(piece.claims.values()):
            self._end(claim)
        piece.claims = NO_CLAIMS

    # ---- what clients hold

    def _lapse(self) -> None:
        """End the claims that were last used too long ago."""
        oldest, oldest_below = self._stored - self._memory, self._stored_below - self._lately
        while len(self._moments) > 1:
            moment = self._moments[0]
            if moment.stored >= oldest and moment.stored_below >= oldest_below:
                return
            self._moments.popleft()
            for claim in list(moment.claims):
                self._lose(claim)

    def _lose(self, claim: _Claim) -> None:
        """End a claim on a piece that stays."""
        self._end(claim)
        self._share_out(claim.piece)
        if claim.piece.leaves is claim.holder.leaves:
            self._move(claim.piece)

    def _share_out(self, piece: Piece) -> None:
        """A claim on `piece` has ended. The others' parts become equal when a power of two of them are left, which
        costs O(1) for each claim."""
        left = len(piece.claims)
        if left & (left - 1) == 0:
            for claim in piece.claims.values():
                claim.holder.held += piece.size / left - claim.part
                claim.part = piece.size / left

    def _end(self, claim: _Claim) -> None:
        holder = claim.holder
        del claim.moment.claims[claim], claim.piece.claims[holder]
        holder.held -= claim.part
        holder.claims -= 1
        if not holder.claims:
            del self._holders[holder.client]
            self._above.discard(holder)

    # ---- what is next

    def _list(self, piece: Piece) -> None:
        """Put a leaf into the order of the claiming client that holds least."""
        if not piece.claims:
            self._put(piece, self._leaves)
            return
        holder = min(piece.claims, key=lambda holder: holder.height)
        self._put(piece, holder.leaves)
        height = holder.height
        if height > self._fair_level > self._level:
            self._level = self._fair_level
        if height > self._level:
            self._rank(holder, piece.used)

    def _rank(self, holder: _Holder, used: float) -> None:
        if holder not in self._above or used < self._above.key(holder)[0]:
            self._added += 1
            self._above.put(holder, (used, self._added))

    def _choose(self) -> Piece | None:
        self._lapse()
        while (piece := self._oldest(self._leaves)) is not None:
            if not piece.claims:
                return piece
            self._move(piece)
        if self._stored >= self._valid_until:
            self._read_heights()
        if (piece := self._oldest_above()) is None:
            self._read_heights()
            while (piece := self._oldest_above()) is None and self._lower():
                pass
        return piece

    def _oldest_above(self) -> Piece | None:
        """The least recently used free leaf that only clients above the level claim."""
        while (holder := self._above.first()) is not None:
            piece = self._oldest(holder.leaves) if holder.height > self._level else None
            if piece is None:
                self._above.discard(holder)
            elif any(other.height <= self._level for other in piece.claims):
                self._move(piece)
            elif piece.used > self._above.key(holder)[0]:
                self._above.discard(holder)
                self._rank(holder, piece.used)
            else:
                return piece
        return None

    def _move(self, piece: Piece) -> None:
        """Others claim the leaf than when it was listed, or one of them has fallen below the level."""
        assert piece.leaves is not None
        piece.leaves.discard(piece)
        piece.leaves = None
        if piece.free:
            self._list(piece)

    def _read_heights(self) -> None:
        """Set the level by the greatest height."""
        self._valid_until = self._stored + self._refresh
        self._fair_level = (1 - SLACK) * max(
            (holder.height for holder in self._holders.values()), default=0.0
        )
        self._set_level(self._fair_level)
        above = sum(h.weight for h in self._holders.values() if h.height > self._level)
        self._lately = self._capacity * (1 - above / max(1e-9, sum(h.weight for h in self._holders.values())))

    def _lower(self) -> bool:
        """No client above the level has a free leaf: halve it, or more, so that another one is above. False if all
        are."""
        below = max((h.height for h in self._holders.values() if h.height <= self._level), default=None)
        if below is None:
            return False
        self._set_level(min(self._level / 2, (1 - SLACK) * below) if below >= 1 else -1.0)
        return True

    def _set_level(self, level: float) -> None:
        self._level = level
        self._above = LazyHeap()
        for holder in self._holders.values():
            if holder.height > level and (piece := self._oldest(holder.leaves)) is not None:
                self._rank(holder, piece.used)
