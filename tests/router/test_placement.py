"""One conformance suite over all placements, then each one's own law: D2LPM against the paper's loop and theorem,
thresholds of the cache-aware rule, costs in seconds, Preble's choices."""

import itertools
import pickle
import random
from collections import defaultdict
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.__main__ import make_router
from router.core import Router
from router.events import Arrive, Done, Held, Place, Progress, Query, Refuse, Snapshot, Stored, WorkerUp
from router.placement import PLACEMENTS, build, parameters, parse_options
from router.placement.contract import Ended, Request
from router.placement.d2lpm import D2lpm
from router.placement.preble import Preble, PrefillCost
from router.radix import Match
from router.waiting import Waiting
from router.workers import ExpectedOutputs, Worker
from sglang_fair.settings.program import parse
from tests.router.model import Model
from tests.support.budget import examples, seeds
from tests.support.worker_view import View
from workloads.simulation import Site


def ids(*tokens: int) -> bytes:
    """Token ids as they travel."""
    return np.asarray(tokens, "<u4").tobytes()


def ended(request: Request, worker: str, matched: int = 0, output: int = 0, outcome="ok", **times) -> Ended:
    return Ended(request, worker, matched, output, outcome, **times)


@pytest.mark.slow
def test_what_waiting_requests_match_is_looked_up_once_and_is_never_out_of_date(monkeypatch):
    remembered, looks = Waiting._match, []

    def checked(waiting: Waiting, request: Request) -> Match:
        known = dict(waiting.matches)
        found = remembered(waiting, request)
        looks.append(known.get(request.id) is found)
        assert found == waiting._state.tree.match(request.tokens, request.namespace)
        return found

    monkeypatch.setattr(Waiting, "_match", checked)
    for seed in range(3):
        placement = Model("centralized_dlpm").walk(seed, 400).router.placement
        assert not placement._requests | placement._pulled
    assert any(looks)
    assert not all(looks)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_same_calls_give_the_same_choices(name):
    assert Model(name).walk(7, 200).choices == Model(name).walk(7, 200).choices


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_memory_is_bounded_in_clients(name):
    small = {"max_clients": 50, "remembered_clients": 50, "max_window": 200}
    outputs = 1 if name == "centralized_dlpm" else 50_000  # it keeps every debt, as DLPM does
    placement = build(name, **{key: value for key, value in small.items() if key in parameters(name)})
    router = Router(placement, page_size=4, max_tree_tokens=2000)
    for worker in ("w0", "w1"):
        router.handle(WorkerUp(worker, ""), 0.0)
    sizes = []
    for number in range(4000):
        request = f"{number:08x}"
        router.handle(Arrive(request, f"client {number:08}", ids(*range(number, number + 8))), 0.0)
        router.handle(Done(request, number % outputs), 0.0)
        if number in (2000, 3999):
            own = Own(counted := BytesIO())
            own.dump(placement)
            sizes.append(counted.tell())
    assert sizes[1] < 1.25 * sizes[0]


class Own(pickle.Pickler):
    """Without the workers, which are the core's."""

    def persistent_id(self, one: object) -> str | None:
        return one.name if isinstance(one, Worker) else None


@pytest.mark.parametrize("name", PLACEMENTS)
def test_parameters_are_its_fields(name):
    with pytest.raises(ValueError, match="has no parameter colour"):
        build(name, colour="red")
    ((_, answer),) = Router(build(name), name=name).handle(Query("q"), 0.0, b"peer")
    assert isinstance(answer, Snapshot)
    assert set(answer.state["parameters"]) == set(parameters(name))


def choices_of(name: str, seed: int, *, caches: bool = True, progress: bool = True) -> list[tuple[str, str]]:
    """(request, worker) as one seeded traffic is placed, with or without news of caches and of running answers.

    Of each request the whole answer is reported when it ends, so progress tells nothing that `Done` does not.
    """
    rng = random.Random(seed)
    values = {"slots": 4} if "slots" in parameters(name) else {}
    router = Router(build(name, **values), page_size=4, max_tree_tokens=4000)
    answers: dict[str, int] = {}
    live: list[str] = []
    choices: list[tuple[str, str]] = []

    def tell(event: object, now_s: float) -> None:
        for place in (answer for _, answer in router.handle(event, now_s) if not isinstance(answer, Held)):
            assert isinstance(place, Place)
            live.append(place.id)
            choices.append((place.id, place.worker))

    for worker in WORKERS:
        tell(WorkerUp(worker, "", kv="events"), 0.0)
    for number in range(400):
        head = [rng.randrange(4)] * 4 * rng.randrange(12)
        prompt = ids(*head, *(rng.randrange(9) for _ in range(rng.randrange(12))))
        worker, at, part, roll = rng.choice(WORKERS), rng.random(), rng.random(), rng.random()
        if roll < 0.45:
            answers[f"{number:08x}"] = rng.randrange(1, 100)
            tell(Arrive(f"{number:08x}", f"c{rng.randrange(5)}", prompt), float(number))
        elif roll < 0.6:
            blocks = tuple(hash(prompt[: end + 16]) for end in range(0, len(prompt) - 15, 16))
            if caches and blocks:
                tell(Stored(worker, blocks, None, prompt[: 16 * len(blocks)], 4), float(number))
        elif live and roll < 0.8:
            request = live[int(at * len(live))]
            if progress:
                tell(Progress(request, int(part * answers[request])), float(number))
        elif live:
            request = live.pop(int(at * len(live)))
            tell(Done(request, answers[request], ttft_s=at, tpot_s=at / 10), float(number))
    return choices


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACEMENTS)
def test_it_uses_what_it_says_it_uses(name):
    whole = [choices_of(name, seed) for seed in seeds(5)]
    no_caches = [choices_of(name, seed, caches=False) for seed in seeds(5)]
    no_progress = [choices_of(name, seed, progress=False) for seed in seeds(5)]
    assert (whole != no_caches) is PLACEMENTS[name].uses_caches
    assert (whole != no_progress) is PLACEMENTS[name].uses_progress


def test_an_unknown_placement_is_an_error():
    with pytest.raises(ValueError, match="no placement 'random': there are d2lpm"):
        build("random")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("d2lpm", {"worker_quantum": 0}),
        ("d2lpm", {"worker_quantum": float("nan")}),
        ("d2lpm", {"worker_quantum": "many"}),
        ("d2lpm", {"charge": "half"}),
        ("d2lpm", {"output_weight": -1.0}),
        ("d2lpm", {"max_clients": 0}),
        ("d2lpm", {"client_weights": {"gold": 0}}),
        ("d2lpm", {"client_weights": "gold"}),
        ("d2lpm", {"cache_threshold": 1.1}),
        ("d2lpm", {"cache_threshold": float("nan")}),
        ("d2lpm", {"extend_weight": -1.0}),
        ("d2lpm-queue", {"worker_quantum": 0}),
        ("d2lpm-queue", {"worker_quantum": float("nan")}),
        ("d2lpm-queue", {"delayed": -1.0}),
        ("d2lpm-queue", {"delayed": float("inf")}),
        ("d2lpm-queue", {"client_weights": "gold"}),
        ("d2lpm-queue", {"max_clients": 0}),
        ("least_tokens", {"output_weight": float("inf")}),
        ("centralized_dlpm", {"slots": 0}),
        ("centralized_dlpm", {"quantum": 0}),
        ("cache_aware", {"cache_threshold": 1.5}),
        ("cache_aware", {"balance_rel": 0.5}),
        ("client_round_robin", {"max_clients": 0}),
        ("preble", {"window_s": 0}),
        ("preble", {"imbalance": 0.5}),
    ],
)
def test_bad_values_are_refused(name, values):
    with pytest.raises(ValueError):
        build(name, **values)


# -- round robins


@pytest.mark.parametrize("name", ["round_robin", "client_round_robin"])
def test_round_robins_take_turns_over_all_or_per_client(name):
    views = [View("a"), View("b"), View("c")]
    placement = build(name)
    turns: dict[str, str] = defaultdict(str)
    for client in "xyxxyxxyyxy":
        request = Request("", client, b"", 0)
        worker = placement.place(request, Match(), views, 0.0)
        placement.placed(request, worker, Match(), 0.0)
        turns["" if name == "round_robin" else client] += worker
    assert all(turn in "abcabcabcabc" for turn in turns.values())


# -- D2LPM


WEIGHTS = {"f": 1.0, "g": 2.0, "h": 0.5}
CAPACITIES = {"w0": 1.0, "w1": 4.0, "w2": 0.5}


class Paper:
    """Algorithm 2 as it is printed, with the one line that it lacks, and a quantum per client and worker."""

    def __init__(self, workers: list[str], quantum: dict[tuple[str, str], float]) -> None:
        self.workers, self.quantum, self.extend, self.output = workers, quantum, 1, 2
        self.q: dict[tuple[str, str], float] = {}
        self.s = dict.fromkeys(workers, 0)
        self.sent = dict.fromkeys(workers, 0)

    def load(self, w: str) -> float:
        return self.s[w] / CAPACITIES[w]

    def select_worker(self, followed: set[str], client: str) -> str:
        avail = {w for w in self.workers if self.q[client, w] > 0}
        while not avail:
            for w in self.workers:
                self.q[client, w] += self.quantum[client, w]
            avail = {w for w in self.workers if self.q[client, w] > 0}
        cand = followed & avail
        return min(cand or avail, key=lambda w: (self.load(w), self.sent[w], w))

    def arrive(self, followed: set[str], client: str, tokens: int, free: dict[str, int]) -> str:
        """`free`: tokens that are not charged, by worker."""
        for w in self.workers:
            self.q.setdefault((client, w), 0)
        worker = self.select_worker(followed, client)
        self.q[client, worker] -= self.extend * (tokens - free.get(worker, 0))
        self.s[worker] += 1
        self.sent[worker] += tokens
        return worker

    def finish(self, client: str, worker: str, tokens: int, refund: int) -> None:
        credit = self.q[client, worker] - self.output * tokens
        self.q[client, worker] = min(self.quantum[client, worker], credit + refund) if refund else credit
        self.s[worker] -= 1


WORKERS = ["w0", "w1", "w2"]


@settings(max_examples=examples(150))
@given(
    st.sampled_from([1, 7, 50, 1000]),
    st.sampled_from([0.0, 0.25]),
    st.sampled_from(["full", "extend"]),
    st.lists(
        st.tuples(
            st.sampled_from(["arrives", "arrives", "ok", "failed"]),
            st.sampled_from("fgh"),
            st.sets(st.sampled_from(WORKERS)),
            st.integers(16, 300),
        ),
        max_size=60,
    ),
)
def test_d2lpm_is_the_papers_loop(quantum, threshold, charge, steps):
    """A threshold decides where, among the workers with credit. What fails costs nothing of its prompt; with `charge`
    "extend" nor does what is cached."""
    quanta = {(i, w): quantum * WEIGHTS[i] * CAPACITIES[w] for i in WEIGHTS for w in WORKERS}
    paper = Paper(WORKERS, quanta)
    placement = D2lpm(quantum, client_weights=WEIGHTS, cache_threshold=threshold, charge=charge)
    for worker in WORKERS:
        placement.worker_up(worker, CAPACITIES[worker])
    flights: list[tuple[Request, str, int]] = []
    for what, client, holders, tokens in steps:
        if what == "arrives":
            request = Request("", client, b"", tokens)
            views = [View(w, paper.load(w), paper.sent[w]) for w in WORKERS]
            match = Match(16, tuple(sorted(holders)), dict.fromkeys(holders, 16)) if holders else Match()
            free = match.lengths if charge == "extend" else {}
            expected = paper.arrive(holders if threshold * tokens < 16 else set(), client, tokens, free)
            worker = placement.place(request, match, views, 0.0)
            assert worker == expected
            placement.placed(request, worker, match, 0.0)
            flights.append((request, worker, match.of(worker)))
        elif flights:
            request, worker, matched = flights.pop(tokens % len(flights))
            charged = request.input_tokens - (matched if charge == "extend" else 0)
            paper.finish(request.client, worker, tokens, charged if what == "failed" else 0)
            placement.done(ended(request, worker, matched, output=tokens, outcome=what), 0.0)
        for other, row in placement.credits(10).items():
            assert row == {w: paper.q[other, w] for w in WORKERS}
            assert all(credit <= quanta[other, w] for w, credit in row.items())


def test_d2lpm_jumps_over_any_number_of_refills():
    placement = D2lpm(worker_quantum=1e-3)
    placement.worker_up("a")
    request = Request("", "f", b"", 10**9)
    for _ in range(3):
        assert placement.place(request, Match(), [View("a")], 0.0) == "a"
        placement.placed(request, "a", Match(), 0.0)


def test_d2lpm_new_worker_is_used_at_once_and_excluded_ones_stop_at_the_quantum():
    placement = D2lpm(worker_quantum=100)
    placement.worker_up("a")
    request = Request("", "f", b"", 500)
    placement.place(request, Match(), [View("a")], 0.0)
    placement.placed(request, "a", Match(), 0.0)
    placement.worker_up("b")
    assert placement.credits(1) == {"f": {"a": -400, "b": 100}}
    assert placement.place(request, Match(16, ("a",), {"a": 16}), [View("a"), View("b", 9)], 0.0) == "b"
    assert placement.place(request, Match(), [View("a")], 0.0) == "a"
    assert placement.credits(1) == {"f": {"a": 100, "b": 100}}


def test_d2lpm_never_forgets_a_debt():
    placement = D2lpm(worker_quantum=100, max_clients=4)
    for worker in ("a", "b"):
        placement.worker_up(worker)
    views = [View("a"), View("b")]

    def ask(client: str, tokens: int) -> None:
        request = Request("", client, b"", tokens)
        worker = placement.place(request, Match(), views, 0.0)
        placement.placed(request, worker, Match(), 0.0)
        placement.done(ended(request, worker), 0.0)

    ask("debtor", 1000)
    assert placement.credits(10) == {"debtor": {"a": -900, "b": 100}}
    for number in range(20):
        ask(f"other {number}", 10)
    assert len(placement.credits(100)) == 4
    assert "debtor" not in placement.credits(100)
    ask("debtor", 10)
    assert placement.credits(1)["debtor"] == {"a": -800, "b": 90}


def send(placement: D2lpm, client: str, tokens: int, match: Match, views: list[View]) -> str:
    """A request that is done at once and has no output."""
    request = Request("", client, b"", tokens)
    worker = placement.place(request, match, views, 0.0)
    placement.placed(request, worker, match, 0.0)
    placement.done(ended(request, worker), 0.0)
    return worker


def test_d2lpm_a_smaller_capacity_takes_credit_and_no_debt_away():
    placement = D2lpm(worker_quantum=1000)
    for worker in "ab":
        placement.worker_up(worker, 2.0)
    for _ in range(2):
        send(placement, "f", 2500, Match(16, ("a",), {"a": 16}), [View("a"), View("b")])
    assert placement.credits(1) == {"f": {"a": -500, "b": -500}}
    send(placement, "f", 10, Match(), [View("a")])
    assert placement.credits(1) == {"f": {"a": 1490, "b": 1500}}
    placement.worker_changed("a", 1.0)
    assert placement.credits(1) == {"f": {"a": 1000, "b": 1500}}


# -- LMetric


@pytest.mark.parametrize(
    ("requests", "held", "chosen"), [(1, 500, "a"), (1, 499, "b"), (9, 899, "b"), (9, 900, "a")]
)
def test_lmetric_takes_the_least_product_of_tokens_and_requests(requests, held, chosen):
    """ "a" holds a part of 1,000 tokens and has requests in flight; "b" has neither, and was sent more so far."""
    views = [View("a", load=requests), View("b", dispatched_tokens=1)]
    match = Match(held, ("a",), {"a": held})
    assert build("lmetric").place(Request("", "f", b"", 1000), match, views, 0.0) == chosen


def test_lmetric_among_whole_prompts_takes_the_least_busy():
    views = [View("a", load=9), View("b", load=3), View("c", load=5)]
    match = Match(1000, ("a", "b"), {"a": 1000, "b": 1000})
    assert build("lmetric").place(Request("", "f", b"", 1000), match, views, 0.0) == "b"


# -- centralised DLPM


def centralized(*workers: str, **values) -> Router:
    router = Router(build("centralized_dlpm", **values), name="centralized_dlpm", page_size=4)
    for worker in workers:
        router.handle(WorkerUp(worker, f"http://{worker}"), 0.0)
    return router


def test_centralized_dlpm_shares_its_queue(monkeypatch):
    monkeypatch.setattr("router.waiting.MAX_WAITING", 4)
    router = centralized("a", slots=1)

    def ask(name: str, client: str, now_s: float) -> object:
        ((_, answer),) = router.handle(Arrive(name, client, b""), now_s)
        return answer

    answers = [ask(str(number), "flood", 0.0) for number in range(4)]
    reason = "too many requests wait for a worker: 2 of this client"
    assert answers[1:] == [Held("1"), Held("2"), Refuse("3", reason, retry=True, is_full=True)]
    assert ask("4", "modest", 0.0) == Held("4"), "it may wait"
    router.handle(Done("2", outcome="aborted"), 1.0)
    assert ask("5", "flood", 1.0) == Held("5"), "there is room where one was given up"
    for _ in range(4):
        [flight] = router.flights.by_id
        router.handle(Done(flight), 2.0)
    assert router.state()["in_flight"] == 0
    kinds = [type(ask(f"n{number}", "flood", 3.0)) for number in range(4)]
    assert kinds == [Place, Held, Held, Refuse], "all of it is there again"


def test_centralized_dlpm_follows_prefixes_and_keeps_the_bound_of_one_queue():
    """f always has a cached prefix, g never: LPM alone would serve f only."""
    quantum, prompt, output = 100.0, 32, 4
    router = centralized("a", "b", slots=1, quantum=quantum)
    service = dict.fromkeys("fg", 0.0)
    running: dict[str, tuple[str, float]] = {}
    number = itertools.count()

    def ask(client: str) -> None:
        name = next(number)
        tokens = ids(*([1] * 28 if client == "f" else [name + 9] * 28), *[name + 9] * 4)
        take(router.handle(Arrive(f"{client}{name:06}", client, tokens), 0.0))

    def take(actions) -> None:
        for place in (answer for _, answer in actions if isinstance(answer, Place)):
            cost = prompt - place.matched_tokens
            service[place.id[0]] += cost
            running[place.id] = (place.id[0], cost)

    for _ in range(30):
        for client in "fg":
            ask(client)
    bound = 2 * (prompt + 2 * output * 2 + quantum)
    runs = []
    for _ in range(400):
        request = min(running)
        client, cost = running.pop(request)
        service[client] += 2 * output
        runs.append((client, cost))
        take(router.handle(Done(request, output), 0.0))
        ask(client)
        assert abs(service["f"] - service["g"]) <= bound
    assert sum(cost for client, cost in runs if client == "f") / sum(c == "f" for c, _ in runs) < 8
    switches = sum(before[0] != after[0] for before, after in itertools.pairwise(runs))
    assert switches < len(runs) / 2  # runs on one prefix, not turn by turn


# -- by load alone


def test_least_requests_and_least_tokens_see_different_loads():
    views = [
        View("a", load=1, prefill_tokens=9000, decode_tokens=10),
        View("b", load=3, prefill_tokens=0, decode_tokens=300),
        View("c", load=2, prefill_tokens=100, decode_tokens=100, capacity=0.25),
    ]
    request = Request("", "f", b"", 100)
    assert build("least_requests").place(request, Match(), views, 0.0) == "a"
    assert build("least_tokens").place(request, Match(), views, 0.0) == "b"
    assert build("least_tokens", output_weight=100.0).place(request, Match(), views, 0.0) == "a"
    tied = [View("a", 1, dispatched_tokens=5), View("b", 1, dispatched_tokens=4), View("c", 1, 4)]
    assert build("least_requests").place(request, Match(), tied, 0.0) == "b"
    assert build("least_tokens").place(request, Match(), tied, 0.0) == "b"


@settings(max_examples=examples(100))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 1000))
def test_power_of_two_takes_the_less_loaded_of_two(loads, seed):
    views = [View(f"w{number}", load) for number, load in enumerate(loads)]
    placement, again = build("power_of_two", seed=seed), build("power_of_two", seed=seed)
    chosen = [placement.place(Request("", "f", b"", 1), Match(), views, 0.0) for _ in range(200)]
    assert chosen == [again.place(Request("", "f", b"", 1), Match(), views, 0.0) for _ in range(200)]
    worst = [view for view in views if view.load == max(loads)]
    if len(views) > 1 and len(worst) == 1:
        assert worst[0].name not in chosen
    # all but the last in the order of preference win some pair, and in 200 draws they do
    ranks = sorted(views, key=lambda view: (view.load, view.dispatched_tokens, view.name))
    assert set(chosen) == {view.name for view in ranks[: max(1, len(ranks) - 1)]}


# -- the cache-aware rule


@pytest.mark.parametrize(
    ("held", "loads", "chosen"),
    [
        (30, (0, 0), "a"),  # 0.3 is not more than 0.3
        (31, (9, 0), "b"),
        (31, (0, 64), "b"),  # 64 is not more than 64
        (31, (0, 65), "a"),
        (31, (130, 195), "b"),  # 195 is not more than 1.5 x 130
        (31, (130, 196), "a"),
        (0, (5, 4), "b"),
    ],
)
def test_cache_aware_switches_at_its_thresholds(held, loads, chosen):
    views = [View("a", loads[0]), View("b", loads[1])]
    match = Match(held, ("b",), {"b": held}) if held else Match()
    assert build("cache_aware").place(Request("", "f", b"", 100), match, views, 0.0) == chosen


def test_cache_aware_names_the_first_holder_and_breaks_ties_by_requests():
    placement = build("cache_aware")
    request = Request("", "f", b"", 100)
    views = [View("a", 0, dispatched=7), View("b", 0, dispatched=3), View("c", 0, dispatched=3)]
    match = Match(60, ("b", "c"), {"a": 40, "b": 60, "c": 60})
    assert placement.place(request, match, views, 0.0) == "b"
    assert placement.place(request, match, [views[0], views[2]], 0.0) == "c"
    assert placement.place(request, match, views[:1], 0.0) == "a"
    assert placement.place(request, Match(), views, 0.0) == "b"


def test_expected_outputs_follow_each_client_and_are_bounded():
    outputs = ExpectedOutputs(max_clients=10)
    assert outputs.of("new", 0) == 128
    assert outputs.of("new", 16) == 16
    for _ in range(50):
        outputs.learn("brief", 4)
        outputs.learn("wordy", 1000)
    assert outputs.of("brief", 0) == pytest.approx(4, abs=1)
    assert outputs.of("wordy", 0) == pytest.approx(1000, rel=0.01)
    assert outputs.of("wordy", 64) == 64
    assert 4 < outputs.of("new", 0) < 1000
    for number in range(100):
        outputs.learn(f"client {number}", 7)
    assert len(outputs._means) == 10


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_command_line_reaches_the_placement(name):
    line = ["--bind", "tcp://127.0.0.1:*", "--placement", name, "--client-weights", '{"gold": 2}']
    line += ["--output-weight", "3", "--quantum", "5", "--worker-quantum", "7"]
    threshold = ["--parameter", "cache_threshold=0.25"] if "cache_threshold" in parameters(name) else []
    placed = make_router(parse("router", [*line, *threshold])).state()
    assert placed["placement"] == name
    expected = {"client_weights": {"gold": 2}, "output_weight": 3, "quantum": 5, "worker_quantum": 7,
                "cache_threshold": 0.25}  # fmt: skip
    found = {key: value for key, value in placed["parameters"].items() if key in expected}
    assert found == {key: value for key, value in expected.items() if key in parameters(name)}
    assert ("lpm" in name or name == "deadline") == ("client_weights" in parameters(name))
    simulated = Site(placement=name, quantum=5.0, worker_quantum=7.0).make_router().state()["parameters"]
    assert all(simulated[key] == found[key] for key in ("quantum", "worker_quantum") if key in found)


def test_a_placement_s_options_are_read_as_they_are_written():
    assert parse_options("") == {}
    read = parse_options(" cache_threshold = 0.3,charge=extend, max_clients=5,")
    assert read == {"cache_threshold": 0.3, "charge": "extend", "max_clients": 5}
    for wrong in ("charge", "=3", "charge=full,charge=extend"):
        with pytest.raises(ValueError, match=r"is not one|given twice"):
            parse_options(wrong)


# -- Preble

FLAT = PrefillCost(base_s=0.0, per_token_s=1e-3, per_context_token_s=0.0, per_pair_s=0.0)


def preble(*workers: str, **values) -> Preble:
    placement = Preble(**{"prefill": FLAT, **values})
    for worker in workers:
        placement.worker_up(worker)
    return placement


def prompt(
    head: int, tail: int = 0, head_tokens: int = 100, tail_tokens: int = 0, client: str = "c"
) -> Request:
    tokens = ids(*[head] * head_tokens, *[tail] * tail_tokens)
    return Request("", client, tokens, head_tokens + tail_tokens, 10)


def go(placement, request, match, views, now_s=0.0, done=True) -> str:
    worker = placement.place(request, match, views, now_s)
    placement.placed(request, worker, match, now_s)
    if done:
        placement.done(ended(request, worker, match.of(worker)), now_s)
    return worker


def test_preble_exploits_when_the_greater_part_is_cached():
    placement = preble("a", "b", "c")
    views = [View("a"), View("b"), View("c")]
    for head in range(1, 8):  # "b" and "c" are the loaded ones
        placement.placed(prompt(head), "bc"[head % 2], Match(), 0.0)
    held = Match(60, ("b", "c"), {"b": 60, "c": 60})
    assert placement.place(prompt(9), held, views, 0.0) == "b"  # 3 prefixes against 4 at "c"
    less = Match(50, ("b", "c"), {"b": 50, "c": 50})
    assert placement.place(prompt(9), less, views, 0.0) == "a"
    assert placement.place(prompt(9), held, [views[0], views[2]], 0.0) == "c"
    assert placement.place(prompt(9), held, [views[0]], 0.0) == "a"


def test_preble_breaks_ties_by_the_tokens_sent():
    views = [View("a", dispatched_tokens=7), View("b", dispatched_tokens=3), View("c", dispatched_tokens=3)]
    assert preble("a", "b", "c").place(prompt(1), Match(), views, 0.0) == "b"


def test_preble_exploits_a_prompt_that_is_one_cached_node():
    placement = preble("a", "b")
    views = [View("a"), View("b")]
    assert go(placement, prompt(1), Match(), views) == "a"
    whole = Match(100, ("a",), {"a": 100})
    assert [go(placement, prompt(1), whole, views) for _ in range(5)] == ["a"] * 5


def test_preble_explores_by_load_prefill_and_eviction():
    placement = preble("a", "b", cache_tokens=1000)
    views = [View("a"), View("b")]
    # own prefill P decides where loads are equal
    partial = Match(40, ("b",), {"b": 40})
    assert placement.place(prompt(1), partial, views, 0.0) == "b"
    # load L of the window outweighs it, and is gone after three minutes
    placement.placed(prompt(2), "b", Match(), 0.0)
    placement.done(ended(prompt(2), "b"), 0.0)
    assert placement.place(prompt(1), partial, views, 1.0) == "a"
    assert placement.place(prompt(1), partial, views, 181.0) == "b"
    # decoding under way counts
    placement.placed(Request("", "c", b"", 0, 10), "b", Match(), 200.0)
    assert placement.place(prompt(1), partial, views, 200.0) == "a"
    placement.done(ended(Request("", "c", b"", 0, 10), "b"), 200.0)
    assert placement.place(prompt(1), partial, views, 200.0) == "b"
    # eviction M: what was asked for on "b" must go, what is on "a" may stay
    placement = preble("a", "b", cache_tokens=1000)
    placement.placed(prompt(3, head_tokens=900), "b", Match(), 0.0)
    placement.placed(prompt(4, head_tokens=500), "a", Match(), 0.0)
    placement.placed(prompt(5, head_tokens=430), "a", Match(), 0.0)
    for worker in "ab":
        placement._loads[worker].decode_tokens = 0
    assert placement._eviction_s(placement._loads["b"], 100) == 0
    assert placement._eviction_s(placement._loads["b"], 101) == pytest.approx(0.9)
    assert placement._eviction_s(placement._loads["a"], 101) == pytest.approx(0.5)


@pytest.mark.parametrize("probe", [3, 32])
def test_preble_knows_what_every_worker_costs_after_any_traffic(probe):
    placement = preble("a", "b", "c", cache_tokens=150, warmup_requests=1, window_s=40.0, probe=probe)
    views = [View("a"), View("b"), View("c")]
    rng = random.Random(4)
    for now in range(400):
        asked = prompt(rng.randrange(9), head_tokens=100)
        held = rng.choice([Match(), Match(100, ("a", "b"), {"a": 100, "b": 100})])
        go(placement, asked, held, views[: rng.randrange(1, 4)], float(now))
        if rng.random() < 0.2:
            prefix = rng.choice(list(placement._window.prefixes.values()))
            placement._assign(prefix, rng.sample("abc", rng.randrange(1, 4)))
        for load in placement._loads.values():
            for new_tokens in (0, 100, 400, 10_000):
                missing = load.prefix_tokens + new_tokens - placement.cache_tokens
                lost_s = 0.0
                for prefix in list(load.prefixes.values())[: placement.probe]:
                    if missing <= 0:
                        break
                    missing -= prefix.new_tokens
                    lost_s += prefix.cost_s
                assert placement._eviction_s(load, new_tokens) == pytest.approx(lost_s)
            assert load.load_s == load.prefill_s + load.decode_tokens * load.typical_tpot_s

        def cost_s(view: View, asked: Request, held: Match) -> tuple[float, int, str]:
            """L + M + P of every worker, none left out."""
            load, new_tokens = placement._loads[view.name], asked.input_tokens - held.of(view.name)
            own_s = placement.prefill.of(new_tokens, asked.input_tokens)
            return load.load_s + own_s + placement._eviction_s(load, new_tokens), 0, view.name

        asked = prompt(rng.randrange(9), head_tokens=100)
        held = rng.choice([Match(), Match(48, ("b",), {"b": 48}), Match(48, ("c",), {"a": 16, "c": 48})])
        assert placement._cheapest(asked, held, views) == min(cost_s(view, asked, held) for view in views)[2]


def test_preble_moves_the_cheapest_prefixes_to_the_lightest_worker():
    placement = preble("a", "b", warmup_requests=0, imbalance=1.5)
    views = [View("a"), View("b")]
    placement.warmup_requests = 1000
    for head, times in ((1, 2), (2, 3), (3, 4)):
        for _ in range(times):
            placement.placed(prompt(head), "a", Match(), 0.0)
            placement.done(ended(prompt(head), "a"), 0.0)
    assert placement._loads["a"].load_s == pytest.approx(0.9)
    placement.warmup_requests = 0
    placement._rebalance(0.0)
    assert placement._loads["a"].load_s == pytest.approx(0.7)
    assert placement._loads["b"].load_s == pytest.approx(0.2)
    # its requests now go to "b", though "a" is the one that holds it
    assert placement.place(prompt(1), Match(100, ("a",), {"a": 100}), views, 0.0) == "b"
    assert placement.place(prompt(3), Match(100, ("a",), {"a": 100}), views, 0.0) == "a"
    placement.worker_down("b")
    assert placement.place(prompt(1), Match(100, ("a",), {"a": 100}), views[:1], 0.0) == "a"


def test_preble_replicates_a_prefix_that_is_alone_when_its_worker_slows_down():
    placement = preble("a", "b")
    views = [View("a"), View("b")]
    held = Match(100, ("a",), {"a": 100})
    for now_s, ttft_s in ((0.0, 1.0), (60.0, 1.0), (100.0, 1.5), (150.0, 2.0)):
        placement.placed(prompt(1), "a", Match(), now_s)
        placement.done(ended(prompt(1), "a", ttft_s=ttft_s), now_s)
        placement._rebalance(now_s)
        (prefix,) = placement._loads["a"].prefixes.values()
        assert list(prefix.workers) == ["a"]
    placement.placed(prompt(1), "a", Match(), 155.0)
    placement.done(ended(prompt(1), "a", ttft_s=6.0), 155.0)
    placement._rebalance(155.0)
    assert list(prefix.workers) == ["a", "b"]
    assert placement._loads["a"].load_s == pytest.approx(placement._loads["b"].load_s)
    placement.placed(prompt(2, head_tokens=200), "a", Match(), 160.0)
    placement.done(ended(prompt(2, head_tokens=200), "a"), 160.0)
    assert placement.place(prompt(1), held, views, 160.0) == "b"
    # after the window nothing of it is left
    placement.place(prompt(3), Match(), views, 1000.0)
    assert not placement._window.prefixes
    assert [load.load_s for load in placement._loads.values()] == [0, 0]


def test_preble_counts_a_shared_prefix_once_the_tree_branches_there():
    placement = preble("a", "b")
    first = prompt(1, 2, 100, 40)
    placement.placed(first, "a", Match(), 0.0)
    for tail in (3, 4, 5):
        match = Match(100, ("a",), {"a": 100}, (100,))
        placement.placed(prompt(1, tail, 100, 40), "a", match, 0.0)
    shared = max(placement._window.prefixes.values(), key=lambda prefix: prefix.requests)
    assert (shared.requests, shared.new_tokens, shared.key.tokens) == (3, 100, 100)
    assert shared.cost_s == pytest.approx((1 - 300 / 420) * 3 * 0.1)
