"""The tree against a naive model of the same caches: sets of token tuples per worker."""

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.radix import Hold, RadixTree
from tests.support.budget import examples
from tests.support.tree_check import check, holdings

PAGE = 2
BLOCK_PAGES = {"a": 1, "b": 2, "c": 1}
"""Pages per block of each worker; "c" sends no events."""

Prefix = tuple[int, ...]
Key = tuple[str, Prefix]


def ids(tokens: Prefix) -> bytes:
    """Token ids as they travel."""
    return np.asarray(tokens, "<u4").tobytes()


def block_hash(key: Key) -> int:
    """One number per namespace and prefix, as a hash chain gives."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big", signed=True)


class Model:
    """What each worker holds, said without a tree."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[Key]] = {worker: set() for worker in BLOCK_PAGES}
        self.holds: list[tuple[str, Key]] = []

    def stored(self, worker: str, namespace: str, parent: Prefix, tokens: Prefix, block: int) -> bool:
        if parent and (namespace, parent) not in self.blocks[worker]:
            return False
        whole = parent + tokens
        for end in range(len(parent) + block, len(whole) + 1, block):
            self.blocks[worker].add((namespace, whole[:end]))
        return True

    def removed(self, worker: str, key: Key) -> None:
        namespace, prefix = key
        self.blocks[worker] = {
            (space, held)
            for space, held in self.blocks[worker]
            if space != namespace or held[: len(prefix)] != prefix
        }

    def length(self, worker: str, namespace: str, prompt: Prefix, with_holds: bool = True) -> int:
        known = [prefix for space, prefix in self.blocks[worker] if space == namespace]
        if with_holds:
            known += [prefix for who, (space, prefix) in self.holds if (who, space) == (worker, namespace)]
        best = 0
        for prefix in known:
            common = next(
                (i for i, (x, y) in enumerate(zip(prefix, prompt, strict=False)) if x != y),
                min(len(prefix), len(prompt)),
            )
            best = max(best, common - common % PAGE)
        return best

    def holdings(self, worker: str) -> set[Key]:
        mine = self.blocks[worker]
        return {
            (space, prefix)
            for space, prefix in mine
            if not any(s == space and len(p) > len(prefix) and p[: len(prefix)] == prefix for s, p in mine)
        }


class Pair:
    """The tree and the model, given the same operations."""

    def __init__(self, max_tree_tokens: int) -> None:
        self.tree = RadixTree(PAGE, max_tree_tokens)
        self.model = Model()
        self.live: list[tuple[Hold, str, Key]] = []
        for worker in BLOCK_PAGES:
            self.tree.add_worker(worker, has_events=worker != "c")

    def step(self, kind: str, worker: str, namespace: str, prompt: Prefix, pick: int) -> None:
        block = PAGE * BLOCK_PAGES[worker]
        whole = prompt[: len(prompt) - len(prompt) % block]
        if kind == "hold":
            match = self.tree.match(ids(prompt), namespace) if pick % 2 else None
            hold = self.tree.hold(worker, ids(prompt), namespace, match)
            held = (namespace, prompt[: len(prompt) - len(prompt) % PAGE])
            self.live.append((hold, worker, held))
            self.model.holds.append((worker, held))
        elif kind == "release" and self.live:
            hold, where, held = self.live.pop(pick % len(self.live))
            self.model.holds.remove((where, held))
            served = pick % 3 > 0
            self.tree.release(hold, served)
            if served and where == "c" and held[1]:
                self.model.stored("c", held[0], (), held[1], PAGE)
            self.tree.release(hold, served)
        elif kind == "stored" and whole and worker != "c":
            cut = pick % (len(whole) // block) * block
            parent, tokens = whole[:cut], whole[cut:]
            hashes = tuple(
                block_hash((namespace, whole[:end])) for end in range(cut + block, len(whole) + 1, block)
            )
            above = block_hash((namespace, parent)) if parent else None
            refused = self.tree.unknown_parents
            self.tree.stored(worker, hashes, above, ids(tokens), block, namespace)
            accepted = self.model.stored(worker, namespace, parent, tokens, block)
            assert self.bounded or self.tree.unknown_parents - refused == (not accepted)
        elif kind == "removed" and worker != "c":
            known = sorted(self.model.blocks[worker])
            random.Random(pick).shuffle(known)
            gone = known[: pick % 4]
            self.tree.removed(worker, (*map(block_hash, gone), 12345))
            for key in gone:
                self.model.removed(worker, key)
        elif kind == "clear":
            self.tree.clear(worker)
            self.model.blocks[worker] = set()
        elif kind == "down":
            self.tree.remove_worker(worker)
            self.tree.add_worker(worker, has_events=worker != "c")
            self.model.blocks[worker] = set()
            self.model.holds = [(who, held) for who, held in self.model.holds if who != worker]
            self.live = [entry for entry in self.live if entry[1] != worker]

    @property
    def bounded(self) -> bool:
        return self.tree.max_tree_tokens < 1000


PROMPTS = st.lists(st.integers(0, 1), max_size=14).map(tuple)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["hold", "hold", "release", "stored", "stored", "stored", "removed", "clear", "down"]
        ),
        st.sampled_from(sorted(BLOCK_PAGES)),
        st.sampled_from(["", "x"]),
        PROMPTS,
        st.integers(0, 50),
    ),
    max_size=40,
)


@settings(max_examples=examples(100))
@given(STEPS, PROMPTS)
def test_tree_is_the_model(steps, probe):
    pair = Pair(max_tree_tokens=1_000_000)
    for kind, worker, namespace, prompt, pick in steps:
        pair.step(kind, worker, namespace, prompt, pick)
        check(pair.tree)
        for asked in (prompt, probe):
            match = pair.tree.match(ids(asked), namespace)
            expected = {w: pair.model.length(w, namespace, asked) for w in BLOCK_PAGES}
            assert match.lengths == {w: n for w, n in expected.items() if n}
            assert match.tokens == max(expected.values())
            assert set(match.holders) == {w for w, n in expected.items() if n and n == match.tokens}
        assert holdings(pair.tree, worker) == pair.model.holdings(worker)
    for hold, _, _ in pair.live:
        pair.tree.release(hold, served=False)
    for worker in BLOCK_PAGES:
        pair.tree.clear(worker)
    check(pair.tree)
    sizes = pair.tree.counters()
    assert (sizes["tokens"], sizes["nodes"], sizes["namespaces"], sizes["blocks"]) == (0, 0, 0, 0)


@settings(max_examples=examples(150))
@given(STEPS, st.integers(PAGE, 16) | st.integers(PAGE, 60))
def test_bounded_tree_claims_no_more_than_the_model_and_evicts_nothing_while_there_is_room(
    steps, max_tree_tokens
):
    pair = Pair(max_tree_tokens)
    for kind, worker, namespace, prompt, pick in steps:
        evicted, tokens = pair.tree.evicted_tokens, pair.tree.tokens
        pair.step(kind, worker, namespace, prompt, pick)
        check(pair.tree)
        if pair.tree.evicted_tokens > evicted:
            assert tokens + len(prompt) > max_tree_tokens
            assert pair.tree.tokens > max_tree_tokens - 14  # no more than the leaves that it took
        if not pair.tree.evicted_tokens:
            assert holdings(pair.tree, worker) == pair.model.holdings(worker)
        in_flight = sum(len(held) for _, (_, held) in pair.model.holds)
        assert pair.tree.tokens <= max_tree_tokens + in_flight
        for who, (space, held) in pair.model.holds:
            assert pair.tree.match(ids(held), space).of(who) == len(held)
        match = pair.tree.match(ids(prompt), namespace)
        for who in BLOCK_PAGES:
            assert match.of(who) <= pair.model.length(who, namespace, prompt)
    pair.tree.release(pair.tree.hold("a", ids((9,) * PAGE)))
    assert pair.tree.tokens <= max(max_tree_tokens, sum(len(held) for _, (_, held) in pair.model.holds))


def test_what_was_served_fills_the_tree_to_its_limit_and_no_further():
    tree = RadixTree(PAGE, max_tree_tokens=4 * PAGE)
    tree.add_worker("a", has_events=False)
    sizes = []
    for number in range(8):
        tree.release(tree.hold("a", ids((number,) * PAGE)))
        sizes.append(tree.tokens // PAGE)
    assert sizes == [1, 2, 3, 4, 4, 4, 4, 4]


def test_chunks_of_one_prompt_are_one_node():
    tree = RadixTree(PAGE)
    tree.add_worker("a")
    prompt = tuple(range(40))
    hold = tree.hold("a", ids(prompt))
    parent = None
    for start in range(0, 40, 8):
        hashes = tuple(block_hash(("", prompt[: start + end])) for end in (2, 4, 6, 8))
        tree.stored("a", hashes, parent, ids(prompt[start : start + 8]), PAGE)
        parent = hashes[-1]
    assert tree.nodes == 1
    tree.release(hold)
    assert tree.nodes == 1
    assert holdings(tree, "a") == {("", prompt)}
    check(tree)


def test_a_block_that_is_removed_twice_at_once_is_not_taken_for_two():
    tree = RadixTree(PAGE)
    tree.add_worker("a")
    tree.stored("a", (1, 2), None, ids((0, 0, 1, 1)), PAGE)
    tree.removed("a", (1, 1))
    tree.stored("a", (3,), 2, ids((2, 2)), PAGE)
    assert tree.unknown_parents == 1
    assert not holdings(tree, "a")


def test_events_that_do_not_fit_are_counted():
    tree = RadixTree(16)
    tree.add_worker("a")
    tree.stored("a", (1,), None, ids((1, 2, 3)), 3)
    tree.stored("a", (1, 2), None, ids(tuple(range(16))), 16)
    tree.stored("a", (), None, b"", 16)
    assert tree.misfits == 2
    check(tree)
    assert tree.counters()["namespaces"] == 0


def test_branches_are_where_other_prompts_left():
    tree = RadixTree(PAGE)
    tree.add_worker("a")
    tree.hold("a", ids((1, 1, 2, 2, 3, 3)))
    tree.hold("a", ids((1, 1, 2, 2, 4, 4)))
    tree.hold("a", ids((1, 1, 5, 5)))
    assert tree.match(ids((1, 1, 2, 2, 3, 3, 9, 9))).branches == (2, 4)
    assert tree.match(ids((1, 1, 9, 9))).branches == (2,)
    assert tree.match(ids((1, 1, 2, 2, 3, 3, 9, 9))).tokens == 6


def test_the_least_recently_used_leaves_go_first():
    tree = RadixTree(PAGE, max_tree_tokens=8)
    tree.add_worker("a")
    tree.add_worker("c", has_events=False)
    tree.release(tree.hold("c", ids((2, 2, 2, 2))))
    tree.stored("a", (1, 2), None, ids((1, 1, 1, 1)), PAGE)
    tree.release(tree.hold("a", ids((1, 1, 1, 1))))
    tree.stored("a", (3,), None, ids((3, 3)), PAGE)
    assert tree.match(ids((2, 2, 2, 2))).tokens == 0
    assert (tree.match(ids((1, 1, 1, 1))).tokens, tree.evicted_tokens) == (4, 4)
    tree.release(tree.hold("a", ids((1, 1, 1, 1))))
    tree.stored("a", (4, 5), None, ids((4, 4, 4, 4)), PAGE)
    assert tree.match(ids((3, 3))).tokens == 0
    assert tree.match(ids((1, 1, 1, 1))).tokens == 4
    check(tree)


def test_maps_stay_small_under_churn():
    tree = RadixTree(1, max_tree_tokens=10_000)
    tree.add_worker("a")
    for turn in range(3000):
        prompt = tuple(range(turn, turn + 4))
        hashes = tuple(4 * turn + i for i in range(4))
        tree.stored("a", hashes, None, ids(prompt), 1)
        if turn % 2:
            tree.removed("a", hashes[:1])
    live = tree.worker_tokens("a")
    assert live == 6000
    assert live <= tree.counters()["blocks"] <= 1.25 * live
    assert len(tree._blocks.runs) <= 1.25 * live / 4
    check(tree)


def test_a_hash_that_comes_to_mean_something_else_is_believed():
    tree = RadixTree(PAGE)
    tree.add_worker("a")
    tree.stored("a", (1, 2), None, ids((1, 1, 2, 2)), PAGE)
    tree.stored("a", (2,), None, ids((7, 7)), PAGE)
    tree.removed("a", (2,))
    assert holdings(tree, "a") == {("", (1, 1, 2, 2))}
    tree.removed("a", (1,))
    assert holdings(tree, "a") == set()
    check(tree)


def test_a_worker_whose_blocks_are_no_whole_pages_keeps_what_it_served():
    tree = RadixTree(16)
    tree.add_worker("a")
    prompt = ids(tuple(range(48)))
    tree.release(tree.hold("a", prompt))
    assert tree.match(prompt).tokens == 0
    tree.stored("a", (1, 2), None, prompt, 24)
    tree.stored("a", (3,), 2, ids(tuple(range(24))), 24)
    assert (tree.misfits, tree.unknown_parents) == (2, 0)
    tree.release(tree.hold("a", prompt))
    assert tree.match(prompt).tokens == 48
    tree.removed("a", (1, 2))
    assert tree.match(prompt).tokens == 48
    tree.clear("a")
    assert tree.match(prompt).tokens == 0
    check(tree)


def test_a_parent_that_was_used_longer_ago_than_its_children_stays():
    tree = RadixTree(PAGE, max_tree_tokens=12)
    tree.add_worker("a")
    tree.stored("a", (1, 2, 3), None, ids((1, 1, 2, 2, 3, 3)), PAGE)
    tree.stored("a", (4, 5), 1, ids((4, 4, 5, 5)), PAGE)
    tree.removed("a", (3,))
    tree.removed("a", (5,))
    assert next(iter(tree._structure.evictable)).key == ids((1, 1))
    tree.stored("a", (6, 7, 8, 9), None, ids((6, 6, 7, 7, 8, 8, 9, 9)), PAGE)
    check(tree)
    assert tree.match(ids((1, 1))).tokens == 2
    assert tree.evicted_tokens == 2


def test_a_bad_size_is_refused():
    with pytest.raises(ValueError, match="page_size is 0"):
        RadixTree(0)
    with pytest.raises(ValueError, match="max_tree_tokens is 8"):
        RadixTree(16, 8)


def test_a_long_prompt_in_flight_adds_no_more_than_it_may():
    tree = RadixTree(page_size=2, max_tree_tokens=40, hold_part=5)
    tree.add_worker("a")
    shared = tuple(range(12))
    tree.stored("a", (1, 2, 3), None, ids(shared), 4)
    long = ids(tuple(range(100, 200)))
    hold = tree.hold("a", long)
    assert tree.match(long).tokens == 8
    assert tree.tokens == 20
    # What the tree has of a prompt is held whole, and nothing is added to it.
    further = ids(shared + tuple(range(300, 400)))
    match = tree.match(further)
    other = tree.hold("a", further, "", match)
    assert (tree.match(further).tokens, tree.tokens) == (12, 20)
    assert tree.is_confirmed(other)
    check(tree)
    tree.release(hold)
    tree.release(other)
    assert tree.match(ids(shared)).tokens == 12
    check(tree)
