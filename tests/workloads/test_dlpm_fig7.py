"""DLPM's Figure 7: the prices that its quanta follow from are its programs' own, and what is made of ratios."""

import pytest

from workloads.clients import SCENARIOS, Scale
from workloads.experiments import words
from workloads.experiments.claims import Claim
from workloads.experiments.contract import Cell, Result, TrafficSpec
from workloads.experiments.dlpm_fig7 import Figure7, Grid, Ratio, gain
from workloads.experiments.dlpm_fig7_setting import KINDS, imbalance, is_cut, shown_latency
from workloads.programs import PackedCodec
from workloads.records import Manifest, RequestRecord, Run
from workloads.session import Plan
from workloads.simulation import Site
from workloads.statistics import statistics


@pytest.mark.parametrize("name", KINDS)
def test_prices_are_those_of_a_well_behaved_program(name):
    kind = KINDS[name]
    scale = Scale(document_spread=0.0)
    [good, *_] = SCENARIOS[f"{name}-s1"].clients(scale=scale, rate_per_s=1.0, codec=PackedCodec())
    found = statistics([good.program(0)])
    full = found.requests * (found.prompt_tokens + 2 * found.output_tokens)
    assert found.requests == kind.requests
    assert kind.charged_in_full == pytest.approx(full, rel=0.02)
    assert kind.charged == pytest.approx(full - found.requests * found.shared_tokens, rel=0.02)


def test_rates_grow_with_replicas_and_the_well_behaved_ask_for_three_quarters():
    for cell in Figure7().cells("full"):
        kind = KINDS[SCENARIOS[cell.traffic.name].app]
        good = 3 * cell.traffic.arguments["rate_per_s"]
        assert good == pytest.approx(0.75 * kind.capacity_per_s * cell.site.replicas, rel=1e-3)


def request(worker: str | None, prompt: int, cached: int | None) -> RequestRecord:
    return RequestRecord(
        "a", 0, 0, "s", 0.0, 0.0, 1.0, 1.0, "ok", prompt_tokens=prompt, cached_tokens=cached, worker=worker
    )


def test_imbalance_is_that_of_computed_prompt_tokens_over_all_replicas():
    run = Run(Manifest("w", "s", {}, 1.0, workers=4))
    assert imbalance(run) is None
    run.requests += [
        request("r0", 70, 10),
        request("r2", 30, 10),
        request("r3", 9, None),
        request(None, 9, 0),
    ]
    assert imbalance(run) == pytest.approx(60 / (80 / 4))


def result(name: str, runs: list[dict[str, object]]) -> Result:
    return Result(Cell(name, Site(), TrafficSpec("tot-s1"), Plan(1.0)), runs)


def test_a_latency_that_was_cut_off_stays_a_lower_bound():
    whole, cut = ({"p50_s": 4.0, "p50_cut": cut} for cut in (False, True))
    assert not is_cut(result("a", [whole]), "p50_s")
    assert is_cut(result("a", [whole, cut]), "p50_s")
    assert shown_latency(result("a", [cut]), "p50_s") == "> 4"
    known = {"p50_cut": True, "p99_cut": False, "p50_s": 8.0, "p99_s": 9.0}
    ours = {"p50_cut": False, "p99_cut": False, "p50_s": 2.0, "p99_s": 6.0}
    grid = Grid(
        {name: result(name, [run]) for name, run in (("tot-s1-d1-d2lpm", ours), ("tot-s1-d1-rr", known))}
    )
    assert grid.latencies("rr") == [Ratio(("tot-s1", 1), 4.0, True), Ratio(("tot-s1", 1), 1.5, False)]
    found = gain(grid.latencies("rr"), 2)
    assert (found["most"], found["bound"], found["where"]) == (
        4.0,
        "more than ",
        "S1 tree of thoughts, D = 1",
    )
    assert (found["mean"], found["least"], found["below"], found["points"]) == (2.75, 1.5, 0, 2)
    assert grid.latencies("preble") == []
    assert grid.latencies("d2lpm", under="rr") == [Ratio(("tot-s1", 1), 6 / 9)], (
        "over a cut one there is none"
    )
    assert "up to more than 4.00× (S1 tree of thoughts, D = 1)" in latency_claim(ours, known).ours
    assert "2 of 2 are known" in latency_claim(ours, known).ours
    assert "1 of 2 are known" in latency_claim(ours | {"p50_cut": True}, known).ours


def claims_of(runs: dict[str, dict[str, object]]) -> list[Claim]:
    """What Figure 7 claims of records that have these cells alone."""
    other = {"service_rate": 1.0, "jain": 1.0, "hit_rate": 0.5}
    results = {
        name: Result(
            Cell(name, Site(replicas=int(name.split("-d")[1][0])), TrafficSpec("tot-s1"), Plan(1.0)),
            [other | run],
        )
        for name, run in runs.items()
    }
    return list(words.report(Figure7(), results).claims)


def latency_claim(ours: dict[str, object], others: dict[str, object]) -> Claim:
    """Under RR+LPM, of one point."""
    claims = claims_of({"tot-s1-d1-d2lpm": ours, "tot-s1-d1-rr": others})
    return next(claim for claim in claims if "RR+LPM, beside" in claim.text)
