"""The tree's limit, shared among clients: what a flood leaves of others' prefixes, and whether tree and order agree."""

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.__main__ import make_router
from router.core import Router
from router.events import Arrive, Done, Place, Stored, WorkerDown, WorkerUp
from router.placement import build
from router.radix import Hold, Match, RadixTree
from router.radix.eviction import FairOrder
from sglang_fair.common.weights import Weights
from sglang_fair.core.eviction import MAX_CLAIMS
from sglang_fair.settings.program import parse
from tests.router.test_radix import PAGE, STEPS, Pair, Prefix, ids
from tests.support.budget import examples

LIMIT = 6400
"""Tokens. A request adds at most 200 of them."""
PAGES_OF_16 = 16


class Site:
    """A router with one worker that confirms what it computes and never evicts anything itself."""

    def __init__(self, shares: Weights | None, limit: int = LIMIT) -> None:
        self.router = Router(
            build("round_robin"), page_size=PAGES_OF_16, max_tree_tokens=limit, shares=shares
        )
        self.router.handle(WorkerUp("r0", "http://r0", kv="tcp://r0"), 0.0)
        self.words, self.blocks, self.requests = count(1), count(1), count(1)
        self.now_s = 0.0
        self.last_block: dict[Prefix, int] = {}

    def document(self, tokens: int) -> Prefix:
        return tuple(next(self.words) for _ in range(tokens))

    def matched(self, prompt: Prefix) -> int:
        return self.router.tree.match(ids(prompt)).tokens

    def confirm(self, prompt: Prefix, known: int) -> None:
        """The event for the pages of `prompt` beyond the first `known` tokens."""
        pages = [prompt[:end] for end in range(known + PAGES_OF_16, len(prompt) + 1, PAGES_OF_16)]
        if pages:
            self.last_block |= {page: next(self.blocks) for page in pages}
            self.router.handle(
                Stored(
                    "r0",
                    tuple(self.last_block[page] for page in pages),
                    self.last_block[prompt[:known]] if known else None,
                    ids(prompt[known:]),
                    PAGES_OF_16,
                ),
                self.now_s,
            )

    def ask(self, client: str, prompt: Prefix, *, output: Prefix = (), ends: str = "ok") -> int:
        """One request from arrival to its end; what matched, in tokens. `ends`: or "given up", "ended before its
        events"."""
        self.now_s += 10.0  # what lingers has its end
        name = str(next(self.requests))
        ((_, place),) = self.router.handle(Arrive(name, client, ids(prompt), 8), self.now_s)
        assert isinstance(place, Place)
        if ends == "ok":
            self.confirm(prompt, place.matched_tokens)
        if ends == "ok" and output:
            self.confirm(prompt + output, len(prompt))
        outcome = "aborted" if ends == "given up" else "ok"
        self.router.handle(Done(name, 8, outcome=outcome), self.now_s)
        if ends == "ended before its events":
            self.confirm(prompt, place.matched_tokens)
        return place.matched_tokens


def kept_beside_a_flood(shares: Weights | None) -> float:
    """Three clients use a tenth of the tree each, and a fourth streams unique prompts; the least part that is known of
    their prompts and outputs when they come again."""
    site = Site(shares)
    chats = [(f"small {k % 3}", site.document(112), site.document(48)) for k in range(12)]
    least = 1.0
    for client, prompt, output in chats:
        site.ask(client, prompt, output=output)
    for _ in range(5):
        for _ in range(60):
            site.ask("flood", site.document(144), output=site.document(16))
        for client, prompt, output in chats:
            least = min(least, site.ask(client, prompt + output) / 160)
        site.router.tree.check()
    return least


def test_a_flood_of_unique_prompts_makes_the_router_forget_nobody_else_s_prefix():
    assert kept_beside_a_flood(Weights()) == 1.0


def test_without_shares_it_does():
    assert kept_beside_a_flood(None) == 0.0


ATTACKS = st.lists(
    st.tuples(
        st.sampled_from(["stream", "give up", "before its events", "touch", "extend", "name"]),
        st.integers(0, 2),
        st.integers(1, 9),
    ),
    min_size=10,
    max_size=40,
)


def attacked(attacks: list[tuple[str, int, int]], rounds: int = 3) -> int:
    """The least that three clients with 144 tokens each, and 48 that they share, still find of them."""
    site = Site(Weights())
    head = site.document(48)
    prompts = [(f"small {k}", head + site.document(144)) for k in range(3)]
    least = 192
    for client, prompt in prompts:
        site.ask(client, prompt)
    for _ in range(50):
        site.ask("flood", site.document(192))
    for _ in range(rounds):
        for at, (kind, which, pages) in enumerate(attacks):
            tokens = pages * PAGES_OF_16
            if kind == "stream":
                site.ask("flood", site.document(tokens), output=site.document(PAGES_OF_16))
            elif kind == "give up":
                site.ask("idler", site.document(tokens), ends="given up")
            elif kind == "before its events":
                site.ask("flood", site.document(tokens), ends="ended before its events")
            elif kind == "touch":
                site.ask("flood", prompts[which][1][: 48 + tokens])
            elif kind == "extend":
                site.ask("flood", prompts[which][1] + site.document(tokens))
            elif kind == "name" and at < 10:
                site.ask(f"name {at}", head + site.document(PAGES_OF_16))
        for client, prompt in prompts:
            least = min(least, site.matched(prompt))
            site.ask(client, prompt)
        site.router.tree.check()
    return least


@given(ATTACKS)
@settings(max_examples=examples(30))
def test_small_clients_stay_known_whatever_another_does(attacks):
    assert attacked(attacks) == 192


def test_requests_that_are_given_up_make_nothing_of_others_older():
    assert attacked([("give up", 0, 9)] * 100 + [("stream", 0, 9)] * 50) == 192


@pytest.mark.slow
def test_ten_thousand_names_take_what_they_hold_and_no_more():
    """Every other one has a page of its own; all use a head that a small client uses too, which stores nothing."""
    limit = 240_000
    site = Site(Weights(), limit)
    order = site.router.tree._evictable
    assert isinstance(order, FairOrder)
    head = site.document(64)
    small = [(f"small {k % 2}", head + site.document(2336)) for k in range(20)]  # a tenth of the tree each
    for client, prompt in small:
        site.ask(client, prompt)
    for name in range(10_000):
        site.ask(f"name {name}", head + site.document(PAGES_OF_16) if name % 2 else head)
        if name % 50 == 0:
            site.ask("flood", site.document(2400))
        if name % 2000 == 0:
            for client, prompt in small:
                assert site.ask(client, prompt) == 2400
    assert site.router.tree.evicted_tokens > limit
    assert len(order.held()) <= 5000 + MAX_CLAIMS + 3
    site.router.tree.check()


def test_what_small_clients_use_stays_known_when_the_worker_of_a_flood_dies():
    """The flood's requests are in flight on another worker, which comes back, again and again."""
    site = Site(Weights())
    order = site.router.tree._evictable
    assert isinstance(order, FairOrder)
    own = [("small 0", site.document(160)), ("small 1", site.document(160))]
    for client, prompt in own:
        site.ask(client, prompt)
    for _ in range(20):
        site.router.handle(WorkerUp("r1", "http://r1"), site.now_s)  # without events
        for _ in range(LIMIT // 200):
            name = str(next(site.requests))
            site.router.handle(Arrive(name, "flood", ids(site.document(192)), 8, exclude=("r0",)), site.now_s)
            if next(site.requests) % 3:
                site.router.handle(Done(name, 8), site.now_s)
        site.router.tree.check()
        site.router.handle(WorkerDown("r1"), site.now_s)
        site.router.tree.check()
        for client, prompt in own:
            assert site.ask(client, prompt) == 160
    assert order.held() == {"small 0": 160, "small 1": 160}


def test_weights_are_shares_of_the_tree():
    assert gold_known(Weights({"gold": 3.0})) == 28
    assert gold_known(Weights()) < 28


def gold_known(shares: Weights) -> int:
    """How many of 28 prompts, together 0.7 of the tree, are known as a whole beside a stream."""
    site = Site(shares)
    own = [site.document(160) for _ in range(28)]
    for turn in range(280):
        site.ask("gold", own[turn % 28])
        site.ask("flood", site.document(160))
    return sum(site.matched(prompt) == 160 for prompt in own)


@pytest.mark.parametrize("cache_share", ["on", "off"])
def test_the_setting_decides(cache_share):
    made = make_router(parse("router", ["--bind", "x", "--cache-share", cache_share]))
    assert isinstance(made.tree._evictable, FairOrder) == (cache_share == "on")
    assert make_router(parse("router", ["--bind", "x"])).tree._evictable.fair is False


# ---- tree and order


class ClaimingTree(RadixTree):
    """Its requests are of the client that `client` names."""

    client = ""

    def hold(
        self,
        worker: str,
        tokens: bytes,
        namespace: str = "",
        match: Match | None = None,
        client: str | None = None,
    ) -> Hold:
        return super().hold(worker, tokens, namespace, match, self.client or None)


def claiming(max_tree_tokens: int) -> tuple[Pair, ClaimingTree]:
    pair = Pair(max_tree_tokens)
    tree = ClaimingTree(PAGE, max_tree_tokens, shares=Weights({"x": 2.0}))
    for worker in "abc":
        tree.add_worker(worker, has_events=worker != "c")
    pair.tree = tree
    return pair, tree


@pytest.mark.parametrize("limits", [st.integers(PAGE, 16), st.integers(20, 60), st.just(1_000_000)])
def test_what_is_evicted_is_removed_and_what_is_removed_forgotten(limits):
    @settings(max_examples=examples(60))
    @given(STEPS, limits)
    def holds(steps, max_tree_tokens):
        pair, tree = claiming(max_tree_tokens)
        for kind, worker, namespace, prompt, pick in steps:
            tree.client = ("", "x", "y", "z")[pick % 4]
            pair.step(kind, worker, namespace, prompt, pick)
            tree.check()
            in_flight = sum(len(held) for _, (_, held) in pair.model.holds)
            assert tree.tokens <= max_tree_tokens + in_flight
            for who, (space, held) in pair.model.holds:
                assert tree.match(ids(held), space).of(who) == len(held)
            if not tree.evicted_tokens:
                assert tree.holdings(worker) == pair.model.holdings(worker)
        for hold, _, _ in pair.live:
            tree.release(hold)
            tree.check()
        for worker in "abc":
            tree.remove_worker(worker)
        tree.check()
        assert (tree.tokens, tree.nodes) == (0, 0)

    holds()


def test_a_node_is_not_joined_to_one_that_others_claim():
    tree = RadixTree(PAGE, 100, shares=Weights())
    tree.add_worker("c", has_events=False)
    for client, prompt in (("x", (1, 1)), ("y", (1, 1, 2, 2)), ("y", (1, 1, 2, 2, 3, 3))):
        tree.release(tree.hold("c", ids(prompt), client=client))
        tree.check()
    assert tree.nodes == 2  # what both claim, and the rest, which is one piece


def test_who_uses_a_common_head_holds_a_part_of_it():
    site = Site(Weights())
    head = site.document(64)
    for client in ("a", "b", "a", "b"):
        site.ask(client, head + site.document(32))
    order = site.router.tree._evictable
    assert isinstance(order, FairOrder)
    assert order.held() == {"a": 96, "b": 96}


def test_a_client_that_has_gone_leaves_its_place():
    site = Site(Weights())
    prompt = site.document(160)
    site.ask("gone", prompt)
    for _ in range(7 * LIMIT // 160):
        site.ask("stays", site.document(160))
    assert site.matched(prompt) == 160
    for _ in range(2 * LIMIT // 160):
        site.ask("stays", site.document(160))
    assert site.matched(prompt) == 0


def test_a_node_becomes_a_leaf_and_is_evicted_in_its_turn():
    tree = RadixTree(PAGE, 8, shares=Weights())
    for worker in "ab":
        tree.add_worker(worker)
    tree.stored("b", (1, 2), None, ids((1, 1, 2, 2)), PAGE)
    tree.stored("a", (1,), None, ids((1, 1)), PAGE)
    tree.removed("b", (2,))
    tree.check()
    for block in range(3, 7):
        tree.stored("a", (block,), None, ids((block, block)), PAGE)
    assert tree.match(ids((1, 1))).tokens == 0
