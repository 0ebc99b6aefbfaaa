"""The simulated cluster: the real router and policies under a virtual clock, and the command that runs it."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.placement import PLACEMENTS
from sglang_fair.sim.cost_model import Fitted, to_json
from tests.support.tree_check import holdings
from workloads.arrivals import GammaArrivals
from workloads.clients import SCENARIOS, Client, Scale
from workloads.measures import summarize
from workloads.programs import Call, PackedCodec, Program, Reply
from workloads.records import Records, Run, read
from workloads.session import Plan
from workloads.simulation import Site, describe, simulate
from workloads.simulation.command import Job, SimulateOptions, main, simulate_cell
from workloads.simulation.run import Simulation

CODEC = PackedCodec()
SMALL = Scale(
    good_clients=2,
    question_tokens=100,
    thought_tokens=12,
    height=2,
    bad_branches=4,
    article_tokens=300,
    judgement_tokens=16,
)
TIGHT = Site(replicas=2, kv_tokens=3000, max_running=8, quantum=300.0, worker_quantum=2000.0)
"""So little memory that requests wait and prefixes are evicted."""
TO_THE_END = Plan(duration_s=1.5, drain_s=None)


def traffic(rate_per_s: float = 4.0, seed: str = "0", workload: str = "tot-s1") -> tuple[Client, ...]:
    return SCENARIOS[workload].clients(
        scale=SMALL, rate_per_s=rate_per_s, codec=CODEC, first_s=0.0, seed=seed
    )


def one_call(prompt_tokens: int, output_tokens: int) -> Program:
    yield Call(CODEC.cut("x" * prompt_tokens, prompt_tokens), output_tokens)


def asking(name: str, program: Any, *, first_s: float = 0.0) -> Client:
    return Client(name, program, GammaArrivals(1.0, 0.0, first_s), seed="0")


def done(site: Site, clients: Sequence[Client], plan: Plan = TO_THE_END, **more: Any) -> Simulation:
    """A simulation that has run, to be looked into."""
    with Records(None, describe(site, clients, plan)) as records:
        simulation = Simulation(site, clients, plan, records, **more)
        simulation.run()
    return simulation


def run_of(simulation: Simulation) -> Run:
    return simulation._records.run


def settled(simulation: Simulation) -> None:
    """Nobody waits, nothing runs, and the books agree with what the engines did."""
    for replica in simulation.replicas:
        status = replica.queue.status()
        assert status["conservation"]["ok"], status["conservation"]
        assert status["totals"]["waiting"] == status["totals"]["running"] == 0
    for router in simulation.routers:
        assert router.state()["in_flight"] == router.state()["waiting"] == 0
    assert sum(replica.queue.status()["totals"]["extend_tokens"] for replica in simulation.replicas) > 0


@pytest.fixture
def steps(tmp_path: Path) -> Site:
    """A site whose steps can be reckoned by hand: 10 ms and 0.1 ms a token to prefill, 2 ms to decode."""
    model = Fitted(
        prefill_base_s=0.01,
        prefill_token_s=0.0001,
        prefill_pair_s=0.0,
        prefill_request_s=0.0,
        decode_base_s=0.002,
        decode_request_s=0.0,
        decode_context_token_s=0.0,
    )
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(to_json(model)))
    return Site(cost_model=str(path), kv_tokens=10_000, placement="round_robin", policy="fcfs")


# ---- one request by hand


def test_one_request_takes_what_its_steps_take(steps):
    [record] = simulate(steps, [asking("a", lambda _: one_call(300, 5))], Plan(0.5, drain_s=None)).requests
    assert record.t_first_token_s == pytest.approx(0.01 + 300 * 0.0001)
    assert record.t_done_s == pytest.approx(0.04 + 4 * 0.002)
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (300, 0, 5)
    assert (record.outcome, record.worker, record.status) == ("ok", "r0", 200)
    assert record.token_times[0] == (record.t_first_token_s, 1)
    assert record.token_times[-1] == (record.t_done_s, 5)


def test_a_second_request_finds_the_first_ones_pages(steps):
    def twice(_: int) -> Program:
        prompt = CODEC.encode("y" * 100)
        reply: Reply = yield Call(prompt, 28)
        yield Call(CODEC.join(prompt, CODEC.answer(reply), CODEC.encode("more")), 1)

    first, second = simulate(steps, [asking("a", twice)], Plan(0.5, drain_s=None)).requests
    # 100 + 28 tokens, of which the last one that came out was never put in: 7 whole pages of 16.
    assert second.cached_tokens == 112
    assert second.prompt_tokens == 132
    assert second.t_intended_s == first.t_done_s
    assert second.t_done_s - first.t_done_s == pytest.approx(0.01 + 20 * 0.0001)


def test_the_network_takes_its_time(steps):
    clients = [asking("a", lambda _: one_call(300, 5))]
    [near] = simulate(steps, clients, Plan(0.5, drain_s=None)).requests
    [far] = simulate(replace(steps, hop_s=0.25), clients, Plan(0.5, drain_s=None)).requests
    assert far.t_start_s == near.t_start_s
    assert far.t_first_token_s == pytest.approx(near.t_first_token_s + 0.25)
    assert far.t_done_s == pytest.approx(near.t_done_s + 0.25)


# ---- every placement and every policy


SPREADING = (
    "d2lpm", "round_robin", "client_round_robin", "least_requests", "least_tokens",
    "power_of_two", "cache_aware", "preble", "centralized_dlpm",
)  # fmt: skip
"""Placements that use both replicas for two clients. Another one need not, if it keeps a client at one replica."""


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("workload", ["tot-s1", "judge-s2"])
def test_every_placement_carries_all_programs_to_their_end(placement, workload):
    simulation = done(replace(TIGHT, placement=placement), traffic(workload=workload))
    complete(run_of(simulation))
    assert {program.outcome for program in run_of(simulation).programs} == {"ok"}
    assert simulation.session.progress.programs_done == simulation.session.progress.programs_due > 0
    if placement in SPREADING:
        assert {record.worker for record in run_of(simulation).requests} == {"r0", "r1"}
    settled(simulation)


@pytest.mark.parametrize("payer", ["equal", "per-use"])
def test_clients_can_share_the_price_of_a_prefix(payer, steps):
    site = replace(steps, payer=payer, policy="dlpm")
    clients = [asking("a", lambda _: one_call(320, 2)), asking("b", lambda _: one_call(320, 2), first_s=0.2)]
    simulation = done(site, clients, Plan(0.5, drain_s=None))
    accounts = simulation.replicas[0].queue.status()["clients"]
    assert accounts["b"]["transferred_units"] == -accounts["a"]["transferred_units"] > 0
    settled(simulation)


def complete(run: Run) -> None:
    """Every request that a program sent has one record, and every program that began one, with the same count."""
    requests: dict[tuple[str, int], list[int]] = defaultdict(list)
    for record in run.requests:
        requests[record.client, record.program].append(record.call)
    programs = {(program.client, program.program): program for program in run.programs}
    assert len(programs) == len(run.programs)
    assert {key: program.requests for key, program in programs.items()} == {
        key: len(calls) for key, calls in requests.items()
    }
    for calls in requests.values():
        assert sorted(calls) == list(range(len(calls)))
    for record in run.requests:
        counts = [count for _, count in record.token_times]
        assert counts == sorted(set(counts))
        assert (counts[-1] if counts else 0) == record.output_tokens
        assert [time_s for time_s, _ in record.token_times] == sorted(t for t, _ in record.token_times)
        if record.t_first_token_s is not None:
            assert record.t_intended_s <= record.t_start_s <= record.t_first_token_s <= record.t_done_s
            assert 0 <= record.cached_tokens < record.prompt_tokens


# ---- what a run is


def test_equal_arguments_give_equal_runs():
    runs = [simulate(TIGHT, traffic(), TO_THE_END, seed=seed) for seed in ("1", "1")]
    assert runs[0] == runs[1]
    assert simulate(TIGHT, traffic(seed="other"), TO_THE_END, seed="1").requests != runs[0].requests


def test_a_run_that_is_cut_off_has_a_record_of_everything(steps):
    clients = [asking(name, lambda _: one_call(100, 500)) for name in "abc"]
    plan = Plan(0.5, drain_s=0.201, connections_per_client=1)
    simulation = done(replace(steps, max_running=2), clients, plan)
    run = run_of(simulation)
    complete(run)
    first, second, third = run.requests
    assert {record.outcome for record in run.requests} == {"cancelled"}
    assert {record.error for record in run.requests} == {"the run ended"}
    assert {record.t_done_s for record in run.requests} == {run.end.t_s} == {0.701}
    # Both prompts take 30 ms; the run ends after 671 ms of decoding.
    assert first.output_tokens == second.output_tokens == 1 + 671 // 2
    assert (first.cached_tokens, first.t_first_token_s) == (0, pytest.approx(0.03))
    assert (third.token_times, third.cached_tokens, third.output_tokens) == ([], None, 0)
    assert {(program.outcome, program.t_done_s) for program in run.programs} == {("cancelled", None)}
    assert (simulation.session.progress.cancelled, simulation.session.progress.in_flight) == (3, 0)
    assert summarize(run).throughput_tokens_per_s > 0


def test_what_is_sent_as_the_run_ends_has_a_record(steps):
    def twice(_: int) -> Program:
        yield Call(CODEC.encode("x" * 100), 10)
        yield Call(CODEC.encode("y" * 100), 10)

    clients = [replace(asking("bad", twice), well_behaved=False), asking("good", lambda _: one_call(100, 10))]
    run = simulate(steps, clients, Plan(0.01, drain_s=None, drain_for="well-behaved"))
    complete(run)
    last = run.requests[-1]
    assert (last.client, last.outcome, last.t_start_s) == ("bad", "cancelled", run.end.t_s)


def test_the_records_in_a_file_are_the_run(tmp_path):
    clients = traffic()
    manifest = replace(describe(TIGHT, clients, TO_THE_END, workload="tot-s1"), versions={"here": "1"})
    run = simulate(TIGHT, clients, TO_THE_END, manifest=manifest, path=tmp_path / "run.jsonl")
    again = read(tmp_path / "run.jsonl")
    assert again.manifest.versions == {"here": "1"}
    assert summarize(again) == summarize(run)


def test_what_samples_say_is_what_records_say():
    """At the end of a run, when nobody is served any more, the last samples have all service in them."""
    run = simulate(TIGHT, traffic(), TO_THE_END)
    last = {sample.worker: sample for sample in run.samples}
    late = [record for record in run.requests if record.t_done_s > run.samples[-1].t_s]
    for client in ("good-0", "bad"):
        output = sum(record.output_tokens for record in run.requests if record.client == client)
        told = sum(sample.clients[client]["output_tokens"] for sample in last.values())
        missing = sum(record.output_tokens for record in late if record.client == client)
        assert output - missing <= told <= output
    rounds = sorted({sample.round for sample in run.samples})
    assert rounds == list(range(len(rounds)))
    assert {sample.t_s for sample in run.samples} == {0.5 * count for count in rounds}


def test_the_router_knows_what_the_replicas_cache():
    simulation = done(TIGHT, traffic())
    tree = simulation.routers[0].tree
    for place, replica in enumerate(simulation.replicas):
        known = {tokens for _, tokens in holdings(tree, f"r{place}")}
        assert known == cached(replica)
        assert known
    told = simulation.routers[0].state()["hits"]["measured_cached_tokens"]
    assert told == sum(record.cached_tokens for record in run_of(simulation).requests) > 0
    assert tree.unknown_parents == tree.unknown_removes == tree.misfits == 0
    assert any(replica.cache.evicted_tokens for replica in simulation.replicas)


def cached(replica: Any) -> set[tuple[int, ...]]:
    """Every longest prefix in a replica's cache."""
    found = set()
    stack = [(replica.cache._root, b"")]
    while stack:
        node, prefix = stack.pop()
        prefix += node.key
        stack += [(child, prefix) for child in node.children.values()]
        if prefix and not node.children:
            found.add(tuple(np.frombuffer(prefix, "<u4").tolist()))
    return found


@pytest.mark.parametrize(
    "site",
    [replace(TIGHT, replicas=1)]
    + [replace(TIGHT, placement=name) for name, placement in PLACEMENTS.items() if not placement.uses_caches],
)
def test_a_router_that_cannot_use_it_is_spared_what_is_cached_and_decides_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    spared = done(site, traffic())
    monkeypatch.setattr(Site, "tells_caches", True)
    told = done(site, traffic())
    names = [f"r{number}" for number in range(site.replicas)]
    found = [[holdings(run.routers[0].tree, name) for name in names] for run in (spared, told)]
    assert not any(found[0])
    assert any(found[1])
    assert run_of(spared).requests == run_of(told).requests


def test_routers_that_do_not_know_each_other_share_the_programs():
    site = replace(TIGHT, ingress=(0.8, 0.2))
    first, second = (router.state()["decisions"] for router in done(site, traffic(10.0)).routers)
    assert first > 2 * second > 0


def test_who_asks_too_often_is_refused():
    simulation = done(replace(TIGHT, policy="rpm", policy_options="limit=20"), traffic())
    run = run_of(simulation)
    complete(run)
    refused = [record for record in run.requests if record.outcome == "failed"]
    assert refused
    assert {record.status for record in refused} == {429}
    assert all("requests per minute" in record.error and not record.token_times for record in refused)
    served = [r for r in run.requests if r.client == "bad" and r.worker == "r0" and r.outcome == "ok"]
    assert len(served) == 20
    settled(simulation)


# ---- bad input


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"placement": "nearest"}, "no placement 'nearest'"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"replicas": 0}, "at least 1 replica"),
        ({"ingress": ()}, "positive"),
        ({"hop_s": -1.0}, "negative"),
    ],
)
def test_a_site_that_makes_no_sense_is_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        replace(TIGHT, **wrong)


def test_a_calibrated_site_has_the_replicas_limits(tmp_path, steps):
    limits = {
        "chunk_tokens": 512,
        "pool_tokens": 4096,
        "running": 4,
        "context_tokens": 2048,
        "page_tokens": 8,
    }
    told = {"cost_model": json.loads(Path(steps.cost_model).read_text()), "hop_s": 0.003, "limits": limits}
    path = tmp_path / "replica.json"
    path.write_text(json.dumps(told))
    site = Site.calibrated(path, replicas=2, max_running=None, kv_tokens=2048)
    assert (site.kv_tokens, site.page_tokens, site.max_running) == (2048, 8, 4)
    assert (site.chunked_prefill_tokens, site.hop_s) == (512, 0.003)
    assert site.make_cost_model() == steps.make_cost_model()
    assert main([*FEW, "--cost-model", str(path), "--schedulers", "d2lpm+dlpm"]) == 0
    path.write_text(json.dumps({"cost_model": told["cost_model"]}))
    with pytest.raises(ValueError, match="limits"):
        Site.calibrated(path)


# ---- the command

FEW = [
    *("--good-clients", "1", "--question-tokens", "64", "--thought-tokens", "4", "--jobs", "1"),
    *("--duration", "2", "--drain", "2", "--repeats", "1", "--workloads", "tot-s1", "--rate", "2"),
]


def last_line(text: str) -> Mapping[str, Any]:
    return json.loads(text.strip().splitlines()[-1])


@pytest.mark.slow
def test_the_command_compares_in_processes_as_in_one(tmp_path, capsys):
    out, line = tmp_path / "out", tmp_path / "line"
    sizes = [*FEW, "--schedulers", "d2lpm+dlpm,round_robin+lpm", "--replicas", "1,2"]
    assert main([*sizes, "--out", str(out), "--json", str(line)]) == 0
    printed = capsys.readouterr().out
    told = last_line(printed)
    assert told["bench"] == "simulate"
    schedulers = ("d2lpm+dlpm", "round_robin+lpm")
    assert [row["scheduler"] for row in told["rows"]] == [f"{s} D={d}" for s in schedulers for d in (1, 2)]
    assert all(row["throughput_tokens_per_s"] > 0 for row in told["rows"])
    assert json.loads(line.read_text()) == told
    assert len(list((out / "records").glob("*.jsonl"))) == 4
    assert (out / "summary.json").exists()
    assert main([*sizes, "--jobs", "2"]) == 0
    assert last_line(capsys.readouterr().out)["rows"] == told["rows"]
    last = out / "records" / "tot-s1.d2lpm+dlpm.D=1.0.jsonl"
    last.write_text("".join(last.read_text().splitlines(keepends=True)[:3]))
    assert main([*sizes, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert last_line(printed)["rows"] == told["rows"]
    assert "[1/1]" in printed, "only what was cut off is run again"
    assert main([*FEW, "--out", str(out)]) == 2
    capsys.readouterr()
    assert main([*FEW, "--schedulers", "round_robin+lpm", "--json", str(line / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_options_reach_policy_placement_and_caches():
    given = SimulateOptions(
        policy_options=["dlpm:patience=5"],
        placement_options=["d2lpm:cache_threshold=0.3"],
        schedulers="d2lpm+dlpm,round_robin+dlpm",
        cache_share="on",
    )
    first, second = given.variants.values()
    assert first.policy_options == second.policy_options == "borrow=0.3,patience=5"
    assert first.placement_options == {"cache_threshold": 0.3}
    assert second.placement_options == {}
    for site, fair in ((first, True), (SimulateOptions().site, False)):
        assert site.make_replica(0).cache.order.fair == fair


def test_a_trace_is_replayed(tmp_path, capsys):
    trace = tmp_path / "mine.jsonl"
    lines = [
        {"arrival_s": k / 4, "client": "ab"[k % 2], "input_tokens": 50, "output_tokens": 4} for k in range(20)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    case = SimulateOptions(replicas="1", trace=[trace], schedulers="d2lpm+dlpm", duration=3.0)
    cell, path = case.cell("mine", "d2lpm+dlpm", 0), tmp_path / "run.jsonl"
    simulate_cell(Job(case, cell, None, path))
    run = read(path)
    told = [(r.t_intended_s, r.client, r.prompt_tokens, r.output_tokens) for r in run.requests]
    assert sorted(told) == [tuple(line.values()) for line in lines[:12]]
    assert len(case.traffic(cell, None)) == 2
    assert sum(len(client.arrival_times(until_s=3.0)) for client in case.traffic(cell, 8.0)) == 20
    arguments = ["--jobs", "1", "--repeats", "1", "--duration", "2", "--schedulers", "round_robin+vtc"]
    assert main([*arguments, "--trace", str(trace), "--workloads", "arena"]) == 0
    assert {row["workload"] for row in last_line(capsys.readouterr().out)["rows"]} == {"mine", "arena"}
    trace.write_text('{"arrival_s": 0}')
    assert main([*arguments, "--trace", str(trace)]) == 2
    assert "mine.jsonl:1: " in capsys.readouterr().err


WRONG = {
    "--schedulers": ["d2lpm"],
    "--workloads": ["juggling"],
    "--trace": ["nowhere.jsonl"],
    "--gpu": ["abacus"],
    "--quantum": ["many", "-1"],
    "--replicas": ["0"],
    "--rate": ["0"],
    "--load": ["-1"],
    "--jobs": ["0"],
    "--policy-options": ["patience=3", "dlpm:patience=0"],
    "--placement-options": ["cache_aware:cache_threshold=0.3"],
    "--cache-share": ["maybe"],
    "--client-weights": ["[]", "{", '{"bad": -1}'],
    "--cost-model": ["nowhere.json", __file__],
    "--payer": ["nobody"],
    "--duration": ["0"],
    "--good-clients": ["0"],
    "--thought-tokens": ["0"],
}


@pytest.mark.parametrize("wrong", [(option, value) for option, values in WRONG.items() for value in values])
def test_bad_input_is_one_line_and_exit_code_2(wrong, capsys):
    assert main([*FEW, *wrong]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("sglang-fair simulate: ")
    assert len(told.err.splitlines()) == 1
    assert "{" not in told.out
