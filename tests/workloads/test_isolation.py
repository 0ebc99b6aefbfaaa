"""Bench isolation: who sends what, what the numbers of a row are, and a short run on an emulated GPU."""

import json
from dataclasses import replace

import pytest

from sglang_fair.settings.table import Cluster
from tests.support.budget import is_night
from workloads.clients import client_facts
from workloads.isolation.attacks import OTHER, TRICKLE, VICTIM, Scene, scenes
from workloads.isolation.command import main, our_settings, render
from workloads.isolation.measures import OURS, STOCK, Observed, Stack, observe, rows
from workloads.programs import PackedCodec
from workloads.records import End, Manifest, ProgramRecord, RequestRecord, Run

BY_STOCK = Stack(STOCK, "cache_aware", "sglang:fcfs")
BY_DLPM = Stack(OURS, "d2lpm", "dlpm")
LIGHT_ALONE, VICTIM_ALONE = Scene(light=1), Scene(victim=True)


def first_calls(client, count):
    return [next(client.program(index)) for index in range(count)]


def test_requests_differ_in_length_and_those_of_the_start_are_part_done():
    (client,), _ = Scene("1000-concurrent").load(PackedCodec(), "0", replicas=4)
    calls = first_calls(client, 2_000)
    begun, later = calls[:1_000], calls[1_000:]
    mean = sum(call.max_output_tokens for call in later) / 1_000
    assert mean == pytest.approx(256, rel=0.05)
    assert sum(call.max_output_tokens for call in begun) / 1_000 == pytest.approx(mean / 2, rel=0.1)
    assert {len(call.prompt) // 4 for call in later} <= set(range(256, 769))
    assert first_calls(client, 50) == calls[:50]


def test_light_clients_take_turns_and_wait_longer_where_time_is_slow():
    clients, _ = Scene(light=2).load(PackedCodec(), "0", replicas=4, period_s=5.0, pace=2.0)
    times = [client.arrival_times(until_s=45.0) for client in clients]
    assert times == [(5.0, 25.0), (15.0, 35.0)]


def test_scenes_hold_all_that_a_ratio_needs_and_the_victim_meets_the_trickle_alone():
    found = scenes([TRICKLE, "long-prompts"], 3)
    assert found == (
        Scene(light=3),
        VICTIM_ALONE,
        Scene(TRICKLE, victim=True),
        Scene(TRICKLE),
        Scene(TRICKLE, light=3),
        Scene("long-prompts"),
        Scene("long-prompts", light=3),
    )
    assert [scene.clients for scene in found] == [3, 1, 2, 1, 4, 1, 4]
    assert found[4].name == "light-3+prefill-trickle"


# ---- the numbers


def a_run(requests=(), programs=(), *, duration_s=10.0, end_s=12.0):
    clients, _ = Scene(TRICKLE, light=1, victim=True).load(PackedCodec(), "0", replicas=1)
    manifest = Manifest("x", "x", client_facts(clients), duration_s)
    return Run(manifest, list(requests), list(programs), end=End(end_s))


def a_request(client, due_s, times, *, prompt=100, outcome="ok"):
    first_s = times[0][0] if times else None
    done_s = times[-1][0] if times else 12.0
    output = times[-1][1] if times else 0
    return RequestRecord(
        client, 0, 0, "", due_s, due_s, first_s, done_s, outcome, prompt, 0, output, token_times=times
    )


def test_only_what_came_in_the_span_counts():
    found = observe(
        a_run(
            [
                a_request(VICTIM, 0.0, [(1.0, 1), (3.0, 10), (11.0, 100)]),
                a_request(OTHER, 0.0, [(1.5, 1)]),
                a_request(OTHER, 1.5, [(2.0, 1)]),
            ]
        ),
        2.0,
    )
    assert found.victim_tokens_per_s == {VICTIM: 9 / 8}
    assert found.tokens_per_s == (9 + 101) / 8
    assert found.ttft_p99_s is None
    assert found.programs == 0


def test_a_slow_machines_seconds_are_counted_as_the_engines():
    run = a_run([a_request(VICTIM, 0.0, [(1.0, 1), (3.0, 10)]), a_request("light-0", 4.0, [(5.0, 1)])])
    quick, slow = observe(run, 2.0), observe(run, 2.0, 4.0)
    assert slow.victim_tokens_per_s[VICTIM] == 4 * quick.victim_tokens_per_s[VICTIM]
    assert slow.tokens_per_s == 4 * quick.tokens_per_s
    assert (quick.ttft_p99_s, slow.ttft_p99_s) == (1.0, 0.25)


def test_a_program_that_the_end_cut_off_counts_with_the_time_it_had_taken():
    found = observe(
        a_run(
            [a_request("light-0", 3.0, [(3.5, 1)]), a_request("light-0", 8.0, [], outcome="cancelled")],
            [
                ProgramRecord("light-0", 0, 1.0, 2.5, 1, 0, "ok"),  # of the warm-up
                ProgramRecord("light-0", 1, 3.0, 4.0, 1, 0, "ok"),
                ProgramRecord("light-0", 2, 8.0, None, 1, 0, "cancelled"),
            ],
        ),
        2.0,
    )
    assert found.program_s == {"light-0": (1 + 4) / 2}
    assert (found.programs, found.cut_off) == (2, 1)
    assert found.ttft_p99_s == 4.0


def test_a_run_without_an_end_and_one_that_ended_in_its_warm_up_are_refused():
    with pytest.raises(ValueError, match="no end"):
        observe(replace(a_run(), end=None), 2.0)
    with pytest.raises(ValueError, match="warm-up"):
        observe(a_run(end_s=1.0), 2.0)


def test_a_row_is_ratios_within_a_repeat_and_their_median():
    runs = {
        (BY_STOCK, Scene(TRICKLE)): [Observed(1_000), Observed(2_000)],
        (BY_DLPM, LIGHT_ALONE): [
            Observed(0, {}, {"light-0": 1.0}, 0.1),
            Observed(0, {}, {"light-0": 2.0}, 0.1),
        ],
        (BY_DLPM, VICTIM_ALONE): [Observed(0, {VICTIM: 100.0}), Observed(0, {VICTIM: 50.0})],
        (BY_DLPM, Scene(TRICKLE, victim=True)): [Observed(0, {VICTIM: 50.0}), Observed(0, {VICTIM: 20.0})],
        (BY_DLPM, Scene(TRICKLE)): [Observed(900), Observed(2_000)],
        (BY_DLPM, Scene(TRICKLE, light=1)): [
            Observed(800, {}, {"light-0": 2.0}, 0.2, programs=3),
            Observed(900, {}, {"light-0": 6.0}, 0.4, programs=2, cut_off=1, failed=1),
        ],
    }
    stock, alone, beside = sorted(rows(runs), key=lambda row: (row.stack == OURS, row.clients))
    assert (stock.throughput_over_stock, stock.slowdown_over_n) == (1.0, None)
    assert (alone.clients, alone.throughput_over_stock) == (1, 0.95)
    assert beside.clients == 2
    assert beside.victim_share_of_gps == 2 * (0.5 + 0.4) / 2
    assert beside.slowdown_over_n == (1.0 + 1.5) / 2
    assert beside.ttft_p99_over_solo == 3.0
    assert beside.throughput_over_stock is None, "stock has no run with a light client"
    assert (beside.programs, beside.cut_off, beside.failed) == (5, 1, 1)
    assert "ours, dlpm" in render([beside])


def test_what_stands_behind_dashes_is_for_our_clusters():
    base = Cluster(
        replicas=2,
        engine="emulated",
        gpu="a100-80g",
        model="llama-3.1-8b",
        time_scale=4.0,
        extra=("--a", "b"),
    )
    given = our_settings(base, ["--quantum", "500", "--stall-ms", "50"])
    assert given == replace(base, quantum=500.0, stall_ms=200.0), "a slow engine's milliseconds are long"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--attacks", "none"], "no attack 'none'"),
        (["--policies", "dlpm,none"], "no policy 'none'"),
        (["--light", "0"], "greater than or equal to 1"),
        (["--time-scale", "0"], "must be positive"),
    ],
)
def test_bad_arguments_are_refused(arguments, said, capsys):
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_run_on_an_emulated_gpu_keeps_the_contract(capsys):
    arguments = [
        "--quick", "--attacks", TRICKLE, "--policies", "dlpm", "--replicas", "1",
        "--seconds", "4", "--time-scale", "1.5" if is_night() else "1", "--sglang-router", "/nonexistent",
    ]  # fmt: skip
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == "isolation"
    table = {(row["stack"], row["policy"], row["attack"], row["clients"]): row for row in result["rows"]}
    assert set(table) == {
        (stack, policy, TRICKLE, clients)
        for stack, policy in ((STOCK, "fcfs"), (OURS, "dlpm"))
        for clients in (1, 2)
    }
    for row in table.values():
        assert row["throughput_over_stock"] > 0
        assert row["failed"] == 0
        assert (row["victim_share_of_gps"] is None) == (row["clients"] == 1)
    assert table[STOCK, "fcfs", TRICKLE, 2]["throughput_over_stock"] == 1
