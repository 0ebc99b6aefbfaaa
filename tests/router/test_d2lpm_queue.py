"""`d2lpm-queue` against its definition written out, its rules against clients that send in order to stay, and the cases
it was made for: floods, trees that begin together, a common system prompt."""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core import Router
from router.events import Arrive, Done, WorkerDown, WorkerUp
from router.placement import build
from router.placement.contract import Ended, Request
from router.placement.d2lpm_queue import D2lpmQueue
from router.placement.queues import QUEUE, Queues
from router.radix import Match
from sglang_fair.common.weights import Weights
from tests.router.test_placement import View, ids
from tests.support.budget import examples

INF = math.inf
WEIGHTS = {"f": 1.0, "g": 2.0, "h": 0.5}
CAPACITIES = {"w0": 1.0, "w1": 4.0, "w2": 0.5}
WORKERS = list(CAPACITIES)


def cached(**lengths: int) -> Match:
    """How much of a prompt the workers named hold."""
    longest = max(lengths.values(), default=0)
    return Match(longest, tuple(name for name in lengths if lengths[name] == longest), lengths)


# ---- queues


@settings(max_examples=examples(200))
@given(
    st.lists(st.tuples(st.sampled_from("fghijkl"), st.floats(0.1, 1e7), st.floats(0, 1e4)), max_size=40),
    st.floats(0.1, 1e7),
    st.randoms(use_true_random=False),
)
def test_a_delay_is_that_of_turns_and_at_most_twice_it(sent, more, random):
    """Whatever comes and goes; the sums in buckets of powers of two stand for a look at every client."""
    queues = Queues(Weights(WEIGHTS), 100)
    queues.worker_up("a", 1.0)
    flights: list[tuple[str, float]] = []
    has: dict[str, float] = defaultdict(float)
    for client, units, following in sent:
        queues.begin(queues.of(client), 0, units, following)
        flights.append((client, units))
        if random.random() < 0.4:
            over = flights.pop(random.randrange(len(flights)))
            queues.end(over[0], 0, over[1], 0.0)
    for client in "fghijkl":
        has[client] = queues.at(queues.of(client), 0)[QUEUE]
    for client in "fgh":
        account, weight = queues.of(client), WEIGHTS[client]
        m = has[client] + more
        others = sum(
            min(has[other], m * WEIGHTS.get(other, 1.0) / weight) for other in has if other != client
        )
        (delay,) = queues.delays(account, np.array([m]))
        assert has[client] + others - 1e-6 * (1 + others) <= delay <= m + 2 * others + 1e-6 * (m + others)
    for client, units in flights:
        queues.end(client, 0, units, 0.0)
    assert queues.delays(queues.of("f"), np.array([1e9])) == [0.0]
    assert queues.in_flight == pytest.approx(0.0, abs=1e-9)


# ---- the definition written out


@dataclass
class Definition:
    """B, S and P as the module's head has them, per weight and capacity; with what was in flight."""

    quantum: float
    delayed: float
    flights: list[tuple[Request, str, float, Match]] = field(default_factory=list)
    sent: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    following: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    begun: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0, 0.0]))
    last: dict[str, str] = field(default_factory=dict)

    def price(self, request: Request, worker: str, match: Match) -> float:
        """Units per capacity."""
        extend = request.input_tokens - match.of(worker)
        return (extend + 2 * request.expected_output_tokens) / CAPACITIES[worker]

    def outstanding(self, client: str, worker: str) -> float:
        return sum(units for request, w, units, _ in self.flights if (request.client, w) == (client, worker))

    def allowed(self, client: str, workers: list[str]) -> set[str]:
        reach = self.quantum * WEIGHTS[client] + 1e-6
        b = {w: self.outstanding(client, w) for w in workers}
        short = [w for w in workers if b[w] <= min(b.values()) + reach]
        s = {w: self.sent[client, w] for w in short}
        return {w for w in short if s[w] <= min(s.values()) + reach}

    def cost(self, request: Request, worker: str, match: Match, workers: list[str]) -> float:
        def queue(client: str) -> float:
            return self.outstanding(client, worker) + self.following[client, worker]

        weight = WEIGHTS[request.client]
        m = queue(request.client) + self.price(request, worker, match)
        turns = sum(min(queue(g), m * WEIGHTS[g] / weight) for g in WEIGHTS if g != request.client)
        n = sum(w == worker for _, w, _, _ in self.flights) / CAPACITIES[worker]
        again = max(match.of(w) for w in workers) - match.of(worker)
        crowd = sum(min(8, sum((r.client, w) == (g, worker) for r, w, _, _ in self.flights)) for g in WEIGHTS)
        own = request.input_tokens - match.of(worker)
        cost = m + turns + (1 + self.delayed * n) * again + self.delayed * crowd / CAPACITIES[worker] * own
        is_idle = not any(r.client == request.client for r, *_ in self.flights)
        is_home = is_idle and self.last.get(request.client) == worker and match.of(worker) == match.tokens
        return cost / 2 if is_home else cost

    def place(self, request: Request, worker: str, match: Match) -> None:
        key, units = (request.client, worker), self.price(request, worker, match)
        capacity, begun = CAPACITIES[worker], self.begun[request.client]
        begun[1] += units * capacity
        everywhere = min(match.of(w) for w in WORKERS)
        if match.of(worker) - everywhere < (request.input_tokens - everywhere) / 2:
            begun[0] += 1
            if begun[0] >= 5:
                self.following[key] += max(0.0, begun[1] / begun[0] / capacity - units)
        else:
            self.following[key] = max(0.0, self.following[key] - units)
        self.sent[key] += units
        self.last[request.client] = worker
        self.flights.append((request, worker, units, match))

    def end(self, number: int, output: int, outcome: str) -> Ended:
        request, worker, units, match = self.flights.pop(number)
        prompt = 0 if outcome == "failed" else request.input_tokens - match.of(worker)
        self.sent[request.client, worker] += (prompt + 2 * output) / CAPACITIES[worker] - units
        if not any((r.client, w) == (request.client, worker) for r, w, _, _ in self.flights):
            self.following[request.client, worker] = 0.0
        return Ended(request, worker, match.of(worker), output, outcome)


prompts = st.tuples(
    st.sampled_from("fgh"),
    st.integers(0, 400),
    st.dictionaries(st.sampled_from(WORKERS), st.floats(0, 1), max_size=3),
    st.sampled_from([0, 10, 200]),
    st.sets(st.sampled_from(WORKERS), max_size=2),
)
ends = st.tuples(st.integers(0, 99), st.integers(0, 300), st.sampled_from(["ok", "ok", "aborted", "failed"]))


@settings(max_examples=examples(150))
@given(
    st.sampled_from([1.0, 300.0, 5000.0, INF]),
    st.sampled_from([0.0, 0.5]),
    st.lists(st.one_of(prompts, ends), max_size=60),
)
def test_it_is_its_definition(quantum, delayed, steps):
    """It keeps rules 1 and 2, and of what they allow it takes the least cost, within the factor two of the delays;
    with weights and capacities, aborts and failures, outputs that nobody expected, and workers that are left out."""
    definition = Definition(quantum, delayed)
    placement = D2lpmQueue(worker_quantum=quantum, delayed=delayed, client_weights=WEIGHTS)
    for worker, capacity in CAPACITIES.items():
        placement.worker_up(worker, capacity)
    for step in steps:
        if len(step) == 5:
            client, tokens, parts, output, excluded = step
            match = cached(**{w: held for w, part in parts.items() if (held := int(part * tokens))})
            request = Request("", client, b"", tokens, 0, output)
            workers = [w for w in WORKERS if w not in excluded]
            chosen = placement.place(request, match, [View(w) for w in workers], 0.0)
            for w in excluded:
                least = min(definition.sent[client, other] for other in workers)
                definition.sent[client, w] = max(definition.sent[client, w], least)
            allowed = definition.allowed(client, workers)
            assert chosen in allowed
            least = min(definition.cost(request, w, match, workers) for w in allowed)
            assert definition.cost(request, chosen, match, workers) <= 2 * least + 1e-6
            placement.placed(request, chosen, match, 0.0)
            definition.place(request, chosen, match)
        elif definition.flights:
            at, output, outcome = step
            placement.done(definition.end(at % len(definition.flights), output, outcome), 0.0)
        for client, row in placement.credits(10).items():
            sent = [definition.sent[client, w] for w in WORKERS]
            for worker, left in row.items():
                most = quantum * WEIGHTS[client] + min(sent)
                expected = (most - definition.sent[client, worker]) * CAPACITIES[worker]
                assert left == pytest.approx(expected, rel=1e-6, abs=1e-3)


# ---- rules 1 and 2


@settings(max_examples=examples(100))
@given(
    st.sampled_from([50.0, 1000.0]),
    st.integers(1, 30),
    st.sampled_from([1, 40, 400]),
    st.sampled_from(["newest", "oldest", "any"]),
    st.integers(0, 2**32),
)
def test_nobody_can_stay(quantum, depth, tokens, ends_first, seed):
    """A client with one hot prefix, cached at one worker alone, whatever it sends, and whichever of its requests end:
    when one is sent, its worker has at most Q^w + c more in flight than the one with least, and was sent at most so
    much more in all than any where it has not more than Q^w in flight."""
    random = Random(seed)
    placement = D2lpmQueue(worker_quantum=quantum)
    for worker in WORKERS:
        placement.worker_up(worker)
    flights: list[tuple[Request, str, int]] = []
    sent = dict.fromkeys(WORKERS, 0.0)
    largest = 0.0
    for number in range(200):
        length = random.choice([tokens, 2 * tokens])
        request = Request(f"{number}", "f", b"", 1000 + length, 0, random.choice([0, 20]))
        match = cached(w0=1000)
        has = {w: sum(u for _, at, u in flights if at == w) for w in WORKERS}
        short = [w for w in WORKERS if has[w] <= min(has.values()) + quantum]
        worker = placement.place(request, match, [View(w) for w in WORKERS], 0.0)
        placement.placed(request, worker, match, 0.0)
        units = 1000 + length - match.of(worker) + 2 * request.expected_output_tokens
        largest = max(largest, units)
        sent[worker] += units
        flights.append((request, worker, units))
        assert has[worker] + units <= min(has.values()) + quantum + largest + 1e-6
        assert sent[worker] <= min(sent[w] for w in short) + quantum + largest + 1e-6
        while len(flights) >= depth:
            at = {"newest": -1, "oldest": 0, "any": random.randrange(len(flights))}[ends_first]
            request, worker, units = flights.pop(at)
            output = int(request.expected_output_tokens)
            placement.done(Ended(request, worker, match.of(worker), output, "ok"), 0.0)


# ---- what it was made for


def place_all(placement: D2lpmQueue, requests: list[tuple[Request, Match]], views: list[View]) -> list[str]:
    """Sends them without an end."""
    chosen = []
    for request, match in requests:
        worker = placement.place(request, match, views, 0.0)
        placement.placed(request, worker, match, 0.0)
        chosen.append(worker)
    return chosen


def queue_placement(*workers: str, **values: object) -> tuple[D2lpmQueue, list[View]]:
    placement = D2lpmQueue(**values)
    for worker in workers:
        placement.worker_up(worker)
    return placement, [View(worker) for worker in workers]


def test_a_flood_does_not_hide_which_worker_is_better_for_the_others():
    """At "a" one client floods; at "b" are four clients with a request each. For a fifth, "a" is better: one turn."""
    placement, (a, b) = queue_placement("a", "b")
    place_all(placement, [(Request("", "flood", b"", 1000), Match()) for _ in range(50)], [a])
    place_all(placement, [(Request("", f"c{number}", b"", 1000), Match()) for number in range(4)], [b])
    a.load, b.load = 50, 4
    assert placement.place(Request("", "light", b"", 1000), Match(), [a, b], 0.0) == "a"
    assert build("least_requests").place(Request("", "light", b"", 1000), Match(), [a, b], 0.0) == "b"


def test_trees_that_begin_together_are_spread_before_their_branches_come():
    """Roots are short and all that follows is long: of a client that has sent such trees, each worker gets as many."""
    placement, views = queue_placement("a", "b", worker_quantum=INF)
    for _ in range(5):
        root = Request("", "f", b"", 100)
        (worker,) = place_all(placement, [(root, Match())], views)
        held = cached(**{worker: 90})
        branches = [Request("", "f", b"", 100, 0, 500) for _ in range(9)]
        place_all(placement, [(branch, held) for branch in branches], views)
        for request, match, output in [(root, Match(), 0), *((branch, held, 500) for branch in branches)]:
            placement.done(Ended(request, worker, match.of(worker), output, "ok"), 0.0)
    # Another client makes "b" look worse by far more than a root, and by less than a tree.
    place_all(placement, [(Request("", "g", b"", 3000), Match())], views[1:])
    chosen = place_all(placement, [(Request("", "f", b"", 100), Match()) for _ in range(10)], views)
    assert 3 <= chosen.count("b") <= 7


@pytest.mark.parametrize("clients", [1, 3, 200])
@pytest.mark.parametrize("template_tokens", [64, 1024])
def test_it_does_not_crowd_behind_a_common_template(clients, template_tokens):
    """Conversations that begin at once, all with one system prompt, which no worker has at first."""
    router = Router(build("d2lpm-queue"), page_size=16)
    for worker in ("w0", "w1"):
        router.handle(WorkerUp(worker, "", kv="events"), 0.0)
    sent = dict.fromkeys(("w0", "w1"), 0)
    for number in range(71):
        prompt = ids(*range(template_tokens), *[10_000 + number] * 40)
        arrive = Arrive(f"{number:08x}", f"c{number % clients}", prompt, 64)
        ((_, place),) = router.handle(arrive, 0.0)
        sent[place.worker] += 1
    assert min(sent.values()) >= 0.4 * 71


def test_a_conversation_stays_where_its_history_is_under_load():
    """Two workers under load, one of which has the history; the other is a little less busy."""
    placement, views = queue_placement("a", "b")
    for number in range(40):
        place_all(placement, [(Request("", f"c{number}", b"", 100), Match())], [views[number % 2]])
    place_all(placement, [(Request("", "d", b"", 100), Match())], views[:1])
    turn = Request("", "f", b"", 2000)
    assert placement.place(turn, cached(a=1900), views, 0.0) == "a"
    assert placement.place(turn, cached(a=1900, b=1900), views, 0.0) == "b"


# ---- workers that come and go


def test_a_client_with_nothing_in_flight_goes_on_where_it_was_last():
    """Unless that costs it twice as much, or another worker has more of the prompt."""
    placement = D2lpmQueue(worker_quantum=INF, delayed=0.0)
    for worker in ("a", "b"):
        placement.worker_up(worker)

    def ask(client: str, tokens: int = 100, *, ends: bool = True, **held: int) -> str:
        request, match = Request("", client, b"", tokens, 0, 0), cached(**held)
        chosen = placement.place(request, match, [View("a"), View("b")], 0.0)
        placement.placed(request, chosen, match, 0.0)
        if ends:
            placement.done(Ended(request, chosen, match.of(chosen), 0, "ok"), 0.0)
        return chosen

    assert [ask("light"), ask("flood", 1000, ends=False), ask("flood", 1000, ends=False)] == ["a", "a", "b"]
    assert ask("one more", 99, ends=False) == "a"
    assert [ask("light"), ask("new")] == ["a", "b"]
    assert ask("light", b=50) == "b"
    assert ask("light", ends=False) == "b"
    assert ask("light", ends=False) == "a", (
        "while it has something in flight, it goes wherever it is served first"
    )


def test_a_worker_that_comes_back_is_used_and_not_flooded():
    """It is sent its part from the first request on, and not all until it was sent as much as the others."""
    router = Router(build("d2lpm-queue", worker_quantum=1000.0), page_size=4)
    for worker in ("w0", "w1"):
        router.handle(WorkerUp(worker, ""), 0.0)
    numbers = itertools.count(1)

    def ask() -> str:
        number = next(numbers)
        ((_, place),) = router.handle(Arrive(f"{number:08x}", "f", ids(*[number] * 100)), 0.0)
        return place.worker

    for _ in range(50):
        ask()
    router.handle(WorkerDown("w1"), 0.0)
    assert [ask() for _ in range(50)] == ["w0"] * 50
    for number in range(1, 101):
        router.handle(Done(f"{number:08x}"), 0.0)
    router.handle(WorkerUp("w1", ""), 0.0)
    assert 15 <= [ask() for _ in range(40)].count("w1") <= 25


def test_requests_go_by_capacity_also_when_it_changes():
    placement, views = queue_placement("a", "b")
    placement.worker_changed("b", 3.0)
    requests = [(Request("", "f", b"", 100), Match()) for _ in range(100)]
    assert place_all(placement, requests, views).count("b") == pytest.approx(75, abs=1)
    placement.worker_changed("b", 1.0)
    assert place_all(placement, requests[:50], views).count("a") == pytest.approx(50, abs=1)


def test_forgotten_clients_leave_nothing_behind():
    placement, views = queue_placement("a", "b", max_clients=10)
    for number in range(500):
        request = Request("", f"c{number}", b"", 100, 0, 50)
        (worker,) = place_all(placement, [(request, Match())], views)
        placement.done(Ended(request, worker, 0, 5000, "ok"), 0.0)
    assert len(placement.credits(1000)) <= 11
    request = Request("", "new", b"", 100)
    (worker,) = place_all(placement, [(request, Match())], views)
    other = "b" if worker == "a" else "a"
    assert placement.credits(1) == {"new": {worker: 250_000.0 - 100, other: 250_000.0}}
