"""Eviction: what small clients keep, whatever others do, and what LRU does with the same requests."""

from collections.abc import Iterator
from itertools import count
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_fair.common.weights import Weights
from sglang_fair.core.eviction import MAX_CLAIMS, MOMENTS, SLACK, FairEviction, LeastRecentlyUsed, Piece
from sglang_fair.sim.cache import Node, PrefixCache
from tests.support.budget import examples


class Cache:
    """A prefix cache of `capacity` tokens that serves one request after another. A prompt is a tuple of words."""

    def __init__(self, capacity: int, order: LeastRecentlyUsed) -> None:
        self.capacity = capacity
        self.order = order
        self.tree = PrefixCache(1, order, events=False)

    def serve(self, client: str, prompt: tuple[int, ...], *, looks_up: bool = False) -> float:
        """The part of `prompt` that was cached. `looks_up`: the request only waits."""
        packed, tokens = np.array(prompt, "<u4").tobytes(), len(prompt)
        node = self.tree.match(packed, tokens)
        found = node.end
        if looks_up:
            return found / tokens
        self.tree.use(client, node)
        self.tree.lock(node)
        self.tree.evict(self.tree.tokens + tokens - found - self.capacity)
        assert self.tree.tokens + tokens - found <= self.capacity, "what can be freed is freed"
        leaf, there = self.tree.insert(packed, tokens, node)
        self.tree.use(client, leaf, tokens - there)
        self.tree.unlock(node)
        return found / tokens


def fresh_words() -> Iterator[int]:
    return count(1)


def document(words: Iterator[int], tokens: int) -> tuple[int, ...]:
    return tuple(next(words) for _ in range(tokens))


# ---- the guarantee, with adversaries

CAPACITY = 1000
SHARE = 200
"""A fifth of the cache, of four clients."""

ATTACKS = st.lists(
    st.one_of(
        st.tuples(st.just("stream"), st.integers(1, 100)),
        st.tuples(st.just("touch"), st.integers(0, 8)),
        st.tuples(st.just("extend"), st.integers(0, 8)),
        st.tuples(st.just("again"), st.integers(0, 50)),
        st.tuples(st.just("look up"), st.integers(0, 50)),
        st.tuples(st.just("name"), st.integers(1, 3)),
    ),
    min_size=20,
    max_size=60,
)


def attacked(order: LeastRecentlyUsed, attacks: list[tuple[str, int]], *, patience: int = 9) -> float:
    """Three clients have three documents each, together a fifth of the cache, and ask about all of them after every
    `patience` attacks. The least part of a document that they found after its first use."""
    words, cache = fresh_words(), Cache(CAPACITY, order)
    documents = [(f"small {k % 3}", document(words, SHARE // 3)) for k in range(9)]
    own: list[tuple[int, ...]] = []
    for client, prompt in documents:
        cache.serve(client, prompt)
    least = 1.0
    for at, (kind, what) in enumerate(attacks):
        if kind == "stream":
            own.append(document(words, what))
            cache.serve("flood", own[-1])
        elif kind == "touch":
            cache.serve("flood", documents[what][1])
        elif kind == "extend":
            prompt = documents[what][1]
            cache.serve("flood", prompt[: len(prompt) // 2] + document(words, 20))
        elif kind == "again" and own:
            cache.serve("flood", own[what % len(own)])
        elif kind == "look up" and own:
            cache.serve("flood", own[what % len(own)], looks_up=True)
        elif kind == "name":
            cache.serve(f"name {at}", document(words, what))
        if at % patience == 0:
            least = min(least, *(cache.serve(*asked) for asked in documents))
    for client, prompt in documents:
        least = min(least, cache.serve(client, prompt))
    return least


@given(ATTACKS)
def test_small_clients_keep_their_documents_whatever_another_does(attacks):
    assert attacked(FairEviction(CAPACITY), [("stream", 100)] * 10 + attacks) == 1.0


@given(ATTACKS)
@settings(max_examples=examples(10))
def test_they_do_while_a_flood_takes_the_cache_five_times_between_their_questions(attacks):
    flood = [("stream", 100)] * 50
    assert attacked(FairEviction(CAPACITY), [*flood, *attacks, *flood], patience=50) == 1.0


@pytest.mark.slow
def test_ten_thousand_names_take_what_they_hold_and_no_more():
    words, capacity = fresh_words(), 60_000
    cache = Cache(capacity, FairEviction(capacity))
    documents = [(f"small {k}", document(words, capacity // 5)) for k in range(3)]
    for client, prompt in documents:
        cache.serve(client, prompt)
    for name in range(10_000):
        cache.serve(f"name {name}", document(words, 1))
        if name % 10 == 0:
            cache.serve("flood", document(words, 400))
        if name % 1000 == 0:
            for client, prompt in documents:
                assert cache.serve(client, prompt) == 1.0


def test_names_without_number_that_use_one_cached_prompt_are_not_all_remembered():
    words, order = fresh_words(), FairEviction(CAPACITY)
    cache, prompt = Cache(CAPACITY, order), document(words, 100)
    for name in range(10_000):
        cache.serve(f"name {name}", prompt)
    assert len(order.held()) == MAX_CLAIMS
    assert sum(order.held().values()) == pytest.approx(100)


@pytest.mark.parametrize("names", [MAX_CLAIMS - 1, MAX_CLAIMS, 3 * MAX_CLAIMS])
def test_names_that_use_what_a_small_client_uses_take_it_from_nobody(names):
    """Neither while they come nor when they are gone."""
    words = fresh_words()
    cache, prompt = Cache(CAPACITY, FairEviction(CAPACITY)), document(words, 100)
    fresh = count()
    cache.serve("small", prompt)
    for _ in range(20):
        assert cache.serve("small", prompt) == 1.0
        for _ in range(names):
            cache.serve(f"name {next(fresh)}", prompt)
        for _ in range(10):
            cache.serve("flood", document(words, 100))
    for _ in range(20):
        assert cache.serve("small", prompt) == 1.0
        for _ in range(10):
            cache.serve("flood", document(words, 100))


@pytest.mark.slow
def test_last_uses_are_kept_in_bounded_memory():
    words, order = fresh_words(), FairEviction(10**6)
    cache = Cache(10**6, order)
    for _ in range(20_000):
        cache.serve("a", document(words, 1))
    assert len(order._moments) <= 20_000 / (10**6 / MOMENTS) + 1


def test_a_name_that_only_looks_up_holds_nothing():
    words, order = fresh_words(), FairEviction(CAPACITY)
    cache, prompt = Cache(CAPACITY, order), document(words, 100)
    cache.serve("a", prompt)
    for name in range(1000):
        cache.serve(f"name {name}", prompt, looks_up=True)
    assert order.held() == {"a": 100.0}


def gold_holds(weights: Weights, order: FairEviction, *, later: float | None = None) -> float:
    """What a client with fourteen documents of 50 tokens holds beside a stream, with a weight from half way on."""
    words, cache = fresh_words(), Cache(CAPACITY, order)
    own = [document(words, 50) for _ in range(14)]
    for round in range(1000):
        cache.serve("gold", own[round % 14])
        cache.serve("stream", document(words, 50))
        if round == 500 and later is not None:
            weights.set("gold", later)
            order.reweigh("gold")
    return order.held()["gold"]


def test_weights_are_shares():
    weights = Weights({"gold": 3.0})
    assert gold_holds(weights, FairEviction(CAPACITY, weights)) == 700
    assert gold_holds(Weights(), FairEviction(CAPACITY)) < 600


def test_a_changed_weight_holds_from_the_next_eviction():
    weights = Weights()
    assert gold_holds(weights, FairEviction(CAPACITY, weights), later=3.0) == 700


# ---- what is free for all


def test_what_nobody_claims_goes_first_and_one_client_may_use_all():
    words, order = fresh_words(), FairEviction(CAPACITY)
    cache = Cache(CAPACITY, order)
    gone = [document(words, 50) for _ in range(10)]
    for prompt in gone:
        cache.serve("gone", prompt)
    alone = [document(words, 100) for _ in range(8)]
    for _ in range(12):  # MEMORY
        for prompt in alone:
            cache.serve("alone", prompt)
        cache.serve("alone", document(words, 800))
    assert "gone" not in order.held()
    for prompt in alone:
        cache.serve("alone", prompt)
    assert [cache.serve("alone", prompt) for prompt in alone] == [1.0] * 8


def test_of_one_client_it_evicts_as_lru_does():
    random = Random(3)
    words = fresh_words()
    prompts = [document(words, random.randint(20, 60)) for _ in range(40)]
    fair, plain = Cache(CAPACITY, FairEviction(CAPACITY)), Cache(CAPACITY, LeastRecentlyUsed())
    for _ in range(2000):
        prompt = random.choice(prompts)
        cut = prompt[: random.randint(1, len(prompt))]
        assert fair.serve("a", cut) == plain.serve("a", cut)


def test_a_prefix_of_many_belongs_to_each_in_part():
    words, order = fresh_words(), FairEviction(CAPACITY)
    cache, system = Cache(CAPACITY, order), document(words, 80)
    for _ in range(2):
        for k in range(8):
            cache.serve(f"client {k}", system)
    assert order.held() == {f"client {k}": 10.0 for k in range(8)}


def test_who_goes_leaves_the_whole_to_those_who_stay():
    words, order = fresh_words(), FairEviction(CAPACITY)
    cache, system = Cache(CAPACITY, order), document(words, 80)
    for _ in range(2):
        for k in range(2):
            cache.serve(f"client {k}", system)
    for _ in range(90):
        cache.serve("client 0", system)
        cache.serve("flood", document(words, 100))
    assert "client 1" not in order.held()
    assert order.held()["client 0"] == pytest.approx(80)


@pytest.mark.parametrize("guests", [0, 40])
def test_a_client_that_is_gone_leaves_its_place_to_those_below_the_level_and_not_to_a_flood(guests):
    """Long before all clients have stored `MEMORY` times the capacity."""
    words, order = fresh_words(), FairEviction(CAPACITY)
    cache = Cache(CAPACITY, order)
    cache.serve("gone", document(words, 20))
    for number in range(25):
        cache.serve("flood", document(words, 100))
        cache.serve(f"guest {number}", document(words, guests)) if guests else None
    assert ("gone" in order.held()) == (guests == 0)


# ---- the books

STEPS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.lists(st.sampled_from([0, 1]), min_size=1, max_size=12).map(tuple),
        st.integers(0, 10),
    ),
    max_size=80,
)


@given(STEPS)
def test_the_books_are_right_after_every_step(steps):
    order = FairEviction(30)
    tree = PrefixCache(1, order, events=False)
    locked: list[Node] = []
    for client, prompt, what in steps:
        if what < 2 and locked:
            tree.unlock(locked.pop(what % len(locked)))
        elif what == 2:
            before, evictable = tree.tokens, tree.evictable_tokens
            assert tree.evict(what) >= min(what, evictable)
            assert tree.tokens < before or not evictable
        else:
            packed = np.array(prompt, "<u4").tobytes()
            node, there = tree.insert(packed, len(prompt), tree.match(packed, len(prompt)))
            tree.use(f"c{client}", node, len(prompt) - there)
            if what == 3:
                tree.lock(node)
                locked.append(node)
        check(order, tree)
    for node in locked:
        tree.unlock(node)
    tree.evict(10**6)
    assert tree.tokens == 0
    check(order, tree)
    assert order.held() == {}


def check(order: FairEviction, tree: PrefixCache) -> None:
    """What clients hold is the sum of their parts, parts cover at least half of what is claimed, and who claims a
    piece claims what is above."""
    held: dict[str, float] = {}
    for piece in pieces(tree):
        assert set(piece.claims) <= set(piece.parent.claims) or piece.parent.parent is None
        parts = [claim.part for claim in piece.claims.values()]
        assert all(0 < part <= piece.size for part in parts)
        assert not parts or sum(parts) >= piece.size / 2 - 1e-9
        assert len(parts) != 1 or parts[0] == pytest.approx(piece.size)
        for holder, claim in piece.claims.items():
            held[holder.client] = held.get(holder.client, 0.0) + claim.part
    assert order.held() == pytest.approx(held)


def pieces(tree: PrefixCache) -> Iterator[Node]:
    stack = list(tree._root.children.values())
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()


@given(STEPS)
def test_only_what_clients_above_their_share_claim_goes_while_there_is_some(steps):
    """The claim of the docstring, on every eviction that step 2 makes."""
    order = Watched(30)
    cache = Cache(30, order)
    for client, prompt, what in steps:
        cache.serve(f"c{client}" if what else f"name {client}", (*prompt, what))


class Watched(FairEviction):
    """Checks each eviction against the shares at the last reading of the level."""

    share = 0.0

    def _read_heights(self) -> None:
        super()._read_heights()
        held = self.held()
        self.share = sum(held.values()) / len(held) if held else 0.0

    def take(self) -> Piece | None:
        piece = super()._choose()
        if piece is not None and piece.claims and self._level == self._fair_level:
            holds = self.held()
            assert all(holds[holder.client] > (1 - SLACK) * self.share for holder in piece.claims)
        if piece is not None:
            self.forget(piece)
        return piece
