"""Which node is evicted first, of those that no request in flight refers to.

First those that no event has confirmed, because no replica may have them; then the least recently used. The list
follows the use of nodes, so a parent may come before its children if it was divided since: it is then passed over.

`FairOrder` asks `sglang_fair.core.eviction` instead, as replicas do that share their caches among clients.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from router.radix.node import Node
from sglang_fair.common.weights import Weights
from sglang_fair.core.eviction import FairEviction, Piece


class EvictionOrder:
    """The nodes that may be evicted, in order. `assumed` is the mask of the workers that send no usable events."""

    fair = False
    """Whether it matters which clients' requests use a node: `sent`, `served`, `grew` and `are_alike`."""

    def __init__(self) -> None:
        self.assumed = 0
        self.guessed: OrderedDict[Node, None] = OrderedDict()
        """Those that no event has confirmed, the least recently used first."""
        self.confirmed: OrderedDict[Node, None] = OrderedDict()

    def __contains__(self, node: Node) -> bool:
        return node in self.guessed or node in self.confirmed

    def add(self, node: Node) -> None:
        """`node` was used just now. Its kind may have changed."""
        if node.confirmed & ~self.assumed:
            listed, other = self.confirmed, self.guessed
        else:
            listed, other = self.guessed, self.confirmed
        other.pop(node, None)
        listed[node] = None
        listed.move_to_end(node)

    def discard(self, node: Node) -> None:
        """`node` is in use, or gone."""
        self.guessed.pop(node, None)
        self.confirmed.pop(node, None)

    def gone(self, node: Node) -> None:
        """`node` has left the tree, and its parent's children."""
        self.discard(node)

    def divided(self, upper: Node, lower: Node) -> None:
        """`upper`, which is new, is the first part of what was `lower`."""
        if not upper.refs:
            self.add(upper)

    def joined(self, upper: Node, lower: Node) -> None:
        """`lower` begins with what was `upper`, which has left the tree."""
        self.discard(upper)

    def are_alike(self, upper: Node, lower: Node) -> bool:
        """Whether the same clients claim both."""
        return True

    def sent(self, client: str, leaf: Node) -> None:
        """A request of `client` is in flight; its prompt ends with `leaf`."""

    def served(self, client: str, path: Iterable[Node]) -> None:
        """A request of `client` has been served, and `path` is what is confirmed of its prompt."""

    def grew(self, leaf: Node) -> None:
        """An event has added `leaf` to the tree."""

    def reweigh(self, client: str) -> None:
        """The weight of `client` has changed."""

    def unconfirm(self, node: Node) -> None:
        """A worker does not hold `node` any more: without another's event it is only a guess."""
        if node in self.confirmed and not node.confirmed & ~self.assumed:
            self.add(node)

    def next_leaf(self) -> Node | None:
        """The leaf to evict next; None if all that is left is in use."""
        while listed := self.guessed or self.confirmed:
            node = next(iter(listed))
            if not node.children:
                return node
            listed.move_to_end(node)  # divided since it was used
        return None

    def check(self, nodes: set[Node]) -> None:
        """Asserts that the order fits these nodes, which are all of the tree. For tests."""
        assert not self.guessed.keys() & self.confirmed.keys()
        listed = self.guessed.keys() | self.confirmed.keys()
        assert listed == {node for node in nodes if not node.refs}, "what is not in flight can be evicted"


_GUESSED = 2.0**52
"""How much older a node is if no event has confirmed it: more than there are uses, and sums stay exact."""


class _Piece(Piece):
    """A node, as the rule knows it."""

    __slots__ = ("known", "node")

    def __init__(self, node: Node) -> None:
        super().__init__()
        self.node = node
        self.known = False
        """Its tokens have been counted as stored."""

    @property
    def size(self) -> int:
        return self.node.end - self.node.start

    @property
    def free(self) -> bool:
        return not self.node.children and not self.node.refs


class FairOrder(EvictionOrder):
    """First what nobody claims, then what clients above their share of the tree claim: see `core.eviction`.

    A request claims the end of its prompt when it is sent to a worker, and all of it that is confirmed when it is over.
    Only then are its tokens counted as stored: who sends requests and gives them up makes nothing of others older.
    An event names no client. What it adds below a node that one client alone claims, as a request's output, is that
    client's; what else it adds belongs to nobody, until a request uses it.
    """

    fair = True

    def __init__(self, capacity: int, weights: Weights) -> None:
        super().__init__()
        self._order = FairEviction(capacity, weights)
        self._pieces: dict[Node, _Piece] = {}
        self._uses = 0

    def held(self) -> Mapping[str, float]:
        """What each client that claims something holds, tokens."""
        return self._order.held()

    def reweigh(self, client: str) -> None:
        self._order.reweigh(client)

    def __contains__(self, node: Node) -> bool:
        piece = self._pieces.get(node)
        return piece is not None and piece.leaves is not None and piece.free

    def add(self, node: Node) -> None:
        piece = self._piece(node)
        self._uses += 1
        piece.used = self._uses if node.confirmed & ~self.assumed else self._uses - _GUESSED
        if piece.free:
            self._order.add(piece)

    def discard(self, node: Node) -> None:
        """Nothing to do: a node in use is not free, and passed over."""

    def gone(self, node: Node) -> None:
        self._forget(node)
        above = None if node.parent is None else self._pieces.get(node.parent)
        if above is not None and above.free:
            self._order.add(above)

    def divided(self, upper: Node, lower: Node) -> None:
        below = self._pieces.get(lower)
        if below is not None:
            above = self._piece(upper)
            above.used, above.known = below.used, below.known
            self._order.divided(above, below)

    def joined(self, upper: Node, lower: Node) -> None:
        above, below = self._pieces.pop(upper, None), self._pieces.get(lower)
        if above is not None and below is not None:
            self._order.joined(above, below)

    def are_alike(self, upper: Node, lower: Node) -> bool:
        above, below = self._pieces.get(upper), self._pieces.get(lower)
        if above is None or below is None:
            return above is below
        return above.known == below.known and above.claims.keys() == below.claims.keys()

    def sent(self, client: str, leaf: Node) -> None:
        self._order.use(client, (self._piece(leaf),))

    def served(self, client: str, path: Iterable[Node]) -> None:
        pieces = [self._piece(node) for node in path]
        self._order.use(client, pieces, self._stored(pieces))

    def grew(self, leaf: Node) -> None:
        piece = self._piece(leaf)
        above = None if leaf.parent is None else self._pieces.get(leaf.parent)
        claims = () if above is None else tuple(above.claims)
        client = claims[0].client if len(claims) == 1 else None
        self._order.use(client, (piece,), self._stored((piece,)))

    def unconfirm(self, node: Node) -> None:
        """Nothing to do: it stays where it is until it is used."""

    def next_leaf(self) -> Node | None:
        piece = self._order.take()
        if piece is None:
            return None
        assert isinstance(piece, _Piece)
        return piece.node

    def check(self, nodes: set[Node]) -> None:
        assert self._pieces.keys() <= nodes, "a node that is gone"
        claimed: dict[str, float] = {}
        for node in nodes:
            assert node.refs or node in self._pieces
            assert node.refs or node.children or node in self, "a free leaf that is not listed"
        for piece in self._pieces.values():
            for holder, claim in piece.claims.items():
                assert claim.piece is piece
                claimed[holder.client] = claimed.get(holder.client, 0.0) + claim.part
        held = self._order.held()
        assert claimed.keys() == held.keys()
        assert all(abs(claimed[client] - tokens) < 1e-6 for client, tokens in held.items())

    def _piece(self, node: Node) -> _Piece:
        piece = self._pieces.get(node)
        if piece is None:
            piece = self._pieces[node] = _Piece(node)
        return piece

    def _forget(self, node: Node) -> None:
        piece = self._pieces.pop(node, None)
        if piece is not None:
            self._order.forget(piece)

    def _stored(self, pieces: Iterable[_Piece]) -> int:
        """Tokens of those that are new."""
        tokens = 0
        for piece in pieces:
            if not piece.known:
                piece.known = True
                tokens += piece.size
        return tokens
