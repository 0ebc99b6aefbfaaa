"""Requests with deadlines on the simulated cluster: traffic, the baselines, and whole runs."""

from collections import Counter
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

import pytest

from router.placement.contract import Equipment, Request
from router.radix import RadixTree
from sglang_fair.common.deadlines import Promise
from workloads.deadlines.run import Served, attained, measure, percentile, simulate
from workloads.deadlines.traffic import LONGEST_TOKENS, OUTPUT_MEAN, PROMPT_MEAN, Asked, Stream, requests
from workloads.experiments.qlm_setting import ONE_MODEL, other, qlm, rule
from workloads.simulation import Fleet, Site
from workloads.simulation.baselines import BASELINES
from workloads.simulation.cluster import Cluster, Flight
from workloads.simulation.fleet import DISK_WEIGHTS_PER_S, HOST_WEIGHTS_PER_S, Shelf

TWO = {"a": "mistral-7b", "b": "vicuna-13b"}
NO_MATCH = RadixTree(16, 1000).match(b"")


def mixed(rate_per_s: float = 8.0, most: int = 150) -> list[Asked]:
    return requests(
        [Stream("a", "batch-1", rate_per_s / 2), Stream("b", "batch-2", rate_per_s / 2)], "0", most=most
    )


# ---- traffic


def test_lengths_are_like_sharegpts():
    asked = requests([Stream("m", "batch-1", 10.0, count=20_000)], "0")
    assert fmean(one.prompt_tokens for one in asked) == pytest.approx(PROMPT_MEAN, rel=0.05)
    assert fmean(one.output_tokens for one in asked) == pytest.approx(OUTPUT_MEAN, rel=0.05)
    assert max(one.output_tokens for one in asked) == LONGEST_TOKENS
    assert len(asked) / asked[-1].at_s == pytest.approx(10.0, rel=0.05)


def test_a_stream_does_not_depend_on_the_others():
    stream = Stream("m", "batch-1", 5.0, count=50)
    alone, other = requests([stream], "0"), requests([stream, Stream("n", "interactive", 5.0, count=50)], "0")
    assert alone == [one for one in other if one.model == "m"]
    assert alone != requests([stream], "1")
    assert alone[0].tokens == requests([stream], "0")[0].tokens
    assert len(alone[0].tokens) == 4 * alone[0].prompt_tokens


def test_streams_and_fleets_are_plain_values():
    stream = Stream("m", "batch-1", 5.0)
    assert Stream.from_json({**asdict(stream), "until_s": None}) == stream
    with pytest.raises(ValueError, match="unknown GPU"):
        Fleet(TWO, gpus=("abacus",))
    with pytest.raises(ValueError, match="unknown shape"):
        Fleet({"m": "abacus"})
    with pytest.raises(ValueError, match="models and GPUs"):
        Fleet({})
    with pytest.raises(ValueError, match="loads models for one router"):
        replace(qlm(2, TWO), ingress=(1.0, 1.0))


def test_weights_come_from_disk_once_and_then_from_the_hosts_memory():
    fleet = Fleet({**TWO, "c": "llama-2-70b-4bit"}, host_weight_bytes=45e9)
    shelf = Shelf(fleet, "a")
    size = fleet.weight_bytes("b")
    assert shelf.swap_s("b") == pytest.approx(size / DISK_WEIGHTS_PER_S)
    shelf.load("b")
    assert shelf.swap_s("b") == pytest.approx(size / HOST_WEIGHTS_PER_S)
    shelf.load("c")  # the others go
    assert shelf.swap_s("b") == pytest.approx(size / DISK_WEIGHTS_PER_S)
    cold = Shelf(replace(fleet, warm=False), "a")
    assert cold.swap_s("a") > 5


# ---- runs


def edf(replicas: int = 1, models: Any = TWO, **fleet: Any) -> Site:
    return other("edf", qlm(replicas, models, **fleet))


@pytest.mark.parametrize("placement", ["edf", "fcfs_models", "shepherd", "spread", "qlm"])
def test_everybody_is_answered_once_with_all_of_it(placement):
    asked, site = mixed(), qlm(2, TWO)
    outcome = simulate(site if placement == "qlm" else other(placement, site), asked)
    assert [one.asked for one in outcome.served] == asked
    for one in outcome.served:
        assert one.output_tokens == one.asked.output_tokens
        assert one.asked.at_s <= one.placed_s <= one.first_s <= one.ended_s <= outcome.end_s
    found = measure(outcome)
    assert found["ended"] == found["requests"] == len(asked)
    assert found["output_tokens"] == sum(one.output_tokens for one in asked)
    assert found["extend_tokens"] >= sum(one.prompt_tokens for one in asked)
    is_settled(outcome.cluster)


def is_settled(cluster: Cluster) -> None:
    """Nobody is left, and the books agree."""
    for replica in cluster.replicas:
        replica.check_pool()
        assert len(replica.queue) == 0
        assert replica.queue.status()["conservation"]["ok"]
    [router] = cluster.routers
    assert router.state()["in_flight"] == router.state()["waiting"] == 0
    assert not cluster.flights


def deliveries(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, Flight, str | None]]:
    """When which request reached a replica, with the model that was loaded there by the cost of its steps."""
    found: list[tuple[float, Flight, str | None]] = []
    deliver = Cluster._deliver

    def watched(self: Cluster, flight: Flight) -> None:
        fleet = self._site.fleet
        cost = self.replicas[flight.worker].cost
        there = next((model for model in fleet.models if fleet.cost(flight.worker, model) == cost), None)
        found.append((self.now_s, flight, there))
        assert self.now_s >= self.replicas[flight.worker]._ready_s
        deliver(self, flight)

    monkeypatch.setattr(Cluster, "_deliver", watched)
    return found


def test_a_worker_serves_the_model_that_it_has(monkeypatch):
    """While it loads another one nothing is sent to it, and nothing runs."""
    seen = deliveries(monkeypatch)
    outcome = simulate(edf(), mixed(2.0, 25))
    assert all(flight.model == there for _, flight, there in seen)
    assert {there for _, _, there in seen} == {"a", "b"}
    swaps = outcome.total("swaps")
    assert outcome.total("swap_s") >= swaps * Fleet(TWO).weight_bytes("a") / HOST_WEIGHTS_PER_S > 0


@pytest.mark.slow
def test_what_is_cut_off_for_another_model_goes_on_later_with_what_it_has(monkeypatch):
    """It comes again as a further part of the same answer, due when it was; with a part of the answer written, as late
    again from when it was cut. Nothing is computed twice but prompts."""
    seen = deliveries(monkeypatch)
    outcome = simulate(edf(finish_s=0.0), mixed(4.0, 40))
    parts = [flight for _, flight, _ in seen if flight.parts]
    assert parts
    for one in outcome.served:
        assert one.output_tokens == one.asked.output_tokens
    for _, flight, _ in seen:
        served: Served = flight.owner
        if not flight.written:
            assert flight.request.deadline_s == pytest.approx(served.asked.due_s)
        else:
            assert served.asked.due_s < flight.request.deadline_s
            assert flight.request.deadline_s <= outcome.cluster.now_s + served.asked.slo_s
        assert len(flight.request.tokens) >= 4 * (served.asked.prompt_tokens + flight.written)
    assert sum(one.asked.output_tokens for one in outcome.served) == outcome.total("output_tokens")
    is_settled(outcome.cluster)


def thirds(rate_per_s: float, most: int) -> list[Asked]:
    """As many interactive ones as of each of two batches."""
    model = next(iter(ONE_MODEL))
    classes = ("interactive", "batch-1", "batch-2")
    return requests([Stream(model, name, rate_per_s / 3) for name in classes], "0", most=most)


@pytest.mark.slow
@pytest.mark.parametrize("site", [qlm(1), rule(qlm(1, shares=True))], ids=["qlm", "deadline"])
def test_with_one_model_it_keeps_as_many_deadlines_as_edf(site: Site) -> None:
    """Nor do shares lose any, where clients send alike."""
    asked, paper = thirds(12.0, 600), qlm(1)
    asked = [replace(one, client=f"c{number % 20}") for number, one in enumerate(asked)]
    outcome = simulate(site, asked)
    edf, fcfs = (simulate(other(name, paper), asked) for name in ("edf", "fcfs_models"))
    met = attained(outcome.served)
    assert met >= attained(edf.served) - 0.01
    assert met > attained(fcfs.served) + 0.05
    assert outcome.total("evictions") > 0 == edf.total("evictions")


@pytest.mark.slow
def test_who_is_late_already_does_not_make_others_late() -> None:
    """Far beyond what can be served EDF serves those who have just missed their deadline, all the time."""
    asked = thirds(24.0, 1200)
    ours, theirs = (simulate(site, asked).served for site in (qlm(1), other("edf", qlm(1))))
    assert attained(ours) >= attained(theirs) + 0.1


FLOODS = {
    "claims a second": {"rate_per_s": 30.0},
    "piece by piece": {"rate_per_s": 150.0, "prompts": 0.1, "outputs": 0.03},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_delays_nobody_who_is_within_its_share(kind: str) -> None:
    """It asks for more than the cluster can do, each within a second. A light client is in time; and
    whatever the flood claimed, it is served in the end."""
    length_s, model = 40.0, next(iter(ONE_MODEL))
    streams = [
        Stream(model, "batch-1", 0.25, until_s=length_s, client="light", slo_s=20.0),
        Stream(
            model,
            "batch-1",
            until_s=length_s,
            client="flood",
            slo_s=1.0,
            **FLOODS[kind],
        ),
    ]
    asked = requests(streams, "0")
    served = simulate(rule(qlm(1, shares=True)), asked).served
    assert attained([one for one in served if one.asked.client == "light"]) == 1.0
    assert all(one.ended_s is not None for one in served)


@pytest.mark.slow
def test_whatever_deadlines_they_claim_two_clients_that_wait_are_served_alike() -> None:
    """One claims a second, so nearly all that it sends is late, and the other an hour."""
    model = next(iter(ONE_MODEL))
    claims = {"urgent": 1.0, "patient": 3600.0}
    asked = requests(
        [Stream(model, "batch-1", 20.0, until_s=45.0, client=k, slo_s=v) for k, v in claims.items()], "0"
    )
    sent = dict.fromkeys(claims, 0)
    for one in simulate(rule(qlm(1, shares=True)), asked).served:
        if one.placed_s is not None and one.placed_s <= 45.0:
            sent[one.asked.client] += one.asked.prompt_tokens + 2 * one.asked.output_tokens
    assert sent["urgent"] == pytest.approx(sent["patient"], rel=0.1)


@pytest.mark.slow
def test_with_several_models_qlm_loads_few_times() -> None:
    asked = requests([Stream(model, "batch-1", 2.0) for model in TWO], "0", most=60)
    site = qlm(1, TWO)
    grouped, by_request = simulate(site, asked), simulate(other("edf", site), asked)
    assert grouped.total("swaps") < by_request.total("swaps") / 3
    assert grouped.end_s < by_request.end_s / 2


# ---- the baselines


def a_request(number: int, due_s: float, model: str = "m", tokens: int = 100) -> Request:
    return Request(
        str(number), "c", b"", tokens, 2048, 300.0, model, model=model, promise=Promise("x", 20.0, due_s)
    )


def with_workers(
    name: str, count: int = 1, kv_tokens: int = 5000, models: tuple[str, ...] = ("m",), **options: object
):
    placement = BASELINES[name](**options)
    for number in range(count):
        placement.worker_up(f"r{number}")
        placement.equip(f"r{number}", Equipment(models[0], dict.fromkeys(models, 2.0), kv_tokens, 0), 0.0)
    return placement


def pulled(placement, now_s: float = 0.0) -> list[tuple[str, str]]:
    found = []
    while (chosen := placement.next((), lambda _: NO_MATCH, lambda *_: True, now_s)) is not None:
        request, name = chosen
        placement.placed(request, name, NO_MATCH, now_s)
        found.append((request.id, name))
    return found


@pytest.mark.parametrize(("name", "order"), [("edf", "132"), ("fcfs_models", "012")])
def test_by_deadline_or_arrival_until_the_window_is_full(name, order):
    """400 tokens each, up to 1,000 and one more."""
    placement = with_workers(name, kv_tokens=1000)
    for number, due_s in enumerate((50.0, 10.0, 30.0, 20.0)):
        assert placement.place(a_request(number, due_s), NO_MATCH, (), float(number)) is None
    assert pulled(placement, 5.0) == [(number, "r0") for number in order]


def test_edf_wants_the_model_of_the_next_deadline_and_sends_it_first():
    placement = with_workers("edf", models=("m", "n"))
    placement.place(a_request(0, 10.0, "n"), NO_MATCH, (), 0.0)
    placement.place(a_request(1, 20.0, "m"), NO_MATCH, (), 0.0)
    assert pulled(placement) == []
    assert placement.wanted("r0") == "n"
    placement.equip("r0", Equipment(None, {"m": 2.0, "n": 2.0}), 0.0)
    assert pulled(placement) == []
    placement.equip("r0", Equipment("n", {"m": 2.0, "n": 2.0}), 2.0)
    assert pulled(placement, 2.0) == [("0", "r0")]
    assert placement.wanted("r0") == "m"


def test_with_the_loaded_model_first_edf_swaps_only_if_nobody_has_it():
    placement = with_workers("edf", count=2, models=("m", "n"), prefers_loaded=True)
    placement.equip("r1", Equipment("n", {"m": 2.0, "n": 2.0}), 0.0)
    for number in range(4):
        placement.place(a_request(number, number, "mn"[number % 2]), NO_MATCH, (), 0.0)
    assert pulled(placement) == [("0", "r0"), ("1", "r1"), ("2", "r0"), ("3", "r1")]
    assert (placement.wanted("r0"), placement.wanted("r1")) == ("m", "n")


def test_shepherd_reserves_the_longest_answer_and_never_adds_to_a_batch():
    placement = with_workers("shepherd", kv_tokens=2 * (100 + 2048) + 50)
    for number in range(5):
        placement.place(a_request(number, 10.0 + number), NO_MATCH, (), 0.0)
    assert pulled(placement) == [("0", "r0"), ("1", "r0")]
    assert pulled(placement) == []


def test_shepherd_leaves_out_what_is_late_while_others_can_be_in_time():
    placement = with_workers("shepherd", kv_tokens=2 * (100 + 2048) + 50)
    for number, due_s in enumerate((1.0, 40.0, 50.0)):
        placement.place(a_request(number, due_s), NO_MATCH, (), 0.0)
    assert pulled(placement, 5.0) == [("1", "r0"), ("2", "r0")]


@pytest.mark.parametrize("name", ["edf", "fcfs_models", "shepherd", "spread"])
def test_a_request_that_was_given_up_goes_nowhere(name):
    placement = with_workers(name)
    gone = a_request(0, 5.0)
    placement.place(gone, NO_MATCH, (), 0.0)
    placement.place(a_request(1, 9.0), NO_MATCH, (), 0.0)
    placement.give_up(gone)
    assert pulled(placement) == [("1", "r0")]


@pytest.mark.parametrize("name_by", ["turn", "random"])
def test_spread_gives_each_worker_its_own(name_by):
    placement = with_workers("spread", count=3, by=name_by)
    for number in range(30):
        placement.place(a_request(number, float(number), tokens=1), NO_MATCH, (), 0.0)
    counts = Counter(name for _, name in pulled(placement))
    assert set(counts) == {"r0", "r1", "r2"}
    if name_by == "turn":
        assert set(counts.values()) == {10}


# ---- measures


def test_attained_is_the_part_in_time_whoever_was_never_answered_included():
    outcome = simulate(edf(), mixed(20.0, 120), until_s=20.0)
    found = measure(outcome)
    late = sum(one.first_s is None or one.first_s > one.asked.due_s for one in outcome.served)
    assert found["attained"] == pytest.approx(1 - late / len(outcome.served))
    assert found["ended"] < found["requests"]
    assert attained([]) is None
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
