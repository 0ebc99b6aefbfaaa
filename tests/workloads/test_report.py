"""From hand-made records with known answers to measures, tables, plots and the comparison's JSON line.

The comparison itself runs here against a server that only pretends to be a cluster.
"""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from sglang_fair.settings import table
from sglang_fair.settings.program import parse
from tests.support.records import request
from tests.support.stand_in import make_tokenizer
from tests.workloads.peer import Peer
from workloads import report
from workloads.clusters import ClusterError, SpawnCluster, turns, verify
from workloads.compare import CompareOptions
from workloads.compare import main as compare_main
from workloads.measures import ratios, rows, summarize
from workloads.records import End, Manifest, ProgramRecord, Records, Run, Sample, read, to_json
from workloads.runs.comparison import SCHEDULERS, Comparison
from workloads.table import Percentile

CLIENTS = {"bad": {"well_behaved": False}, "good": {"well_behaved": True}}


def manifest(**changes) -> Manifest:
    given = {"workload": "w", "scheduler": "s", "clients": CLIENTS, "duration_s": 10.0, "workers": 1}
    return Manifest(**{**given, **changes})


def program(client: str, intended: float, done: float | None, outcome: str = "ok") -> ProgramRecord:
    return ProgramRecord(client, 0, intended, done, 1, 0, outcome)


def run_of(*rows, end_s: float = 12.0, **changes) -> Run:
    run = Run(manifest(**changes))
    for row in (*rows, End(end_s)):
        run.add(row)
    return run


TWO = (
    request("bad", 0.0, 1.0, 2.0),
    request("bad", 0.0, 3.0, 4.0),
    request("bad", 0.0, 11.0, 11.5),  # after the window
    request("good", 1.0, 4.0, 5.0),
    program("bad", 0.0, 4.0),
    program("good", 1.0, 5.0),
)


def test_rates_are_of_the_window_and_count_full_prompts_or_computed_ones():
    summary = summarize(run_of(*TWO))
    assert summary.window_s == 10.0
    assert summary.throughput_tokens_per_s == pytest.approx(3 * 45 / 10)
    assert summary.service_rate == pytest.approx(3 * (40 + 2 * 5) / 10)
    assert summary.actual_rate == pytest.approx(3 * (20 + 2 * 5) / 10)
    assert summary.hit_rate == 0.5
    assert (summary.ok, summary.failed, summary.cancelled) == (4, 0, 0)


def test_output_tokens_count_when_they_come():
    late = request("good", 0.0, 9.0, 11.0, output_tokens=5, token_times=((9.0, 1), (9.5, 3), (10.5, 5)))
    assert summarize(run_of(late)).clients["good"].actual_rate == pytest.approx((20 + 2 * 3) / 10)


def test_jain_is_of_the_time_in_which_all_are_active():
    # `good` begins at 1.0, so what `bad` got at 1.0 is part of it: 100 against 50 units.
    assert summarize(run_of(*TWO)).jain == pytest.approx(150**2 / (2 * (100**2 + 50**2)))
    early = request("bad", 0.0, 0.5, 0.6)
    assert summarize(run_of(*TWO, early)).jain == summarize(run_of(*TWO)).jain
    # With a limited number of programs nobody is active after its last answer: `good` ends at 5.0.
    late = request("bad", 0.0, 6.0, 7.0)
    limited = summarize(run_of(*TWO, late, programs_per_client=1))
    assert limited.active_s == pytest.approx(4.0)
    assert limited.jain == pytest.approx(0.9)
    assert summarize(run_of(*TWO, late)).jain < limited.jain


def test_a_single_client_is_fair_and_has_no_difference():
    assert summarize(run_of(TWO[0])).jain is None, "the other one never came"
    summary = summarize(run_of(request("good", 0.0, 1.0, 2.0), clients={"good": {"well_behaved": True}}))
    assert summary.jain == pytest.approx(1.0)
    assert summary.service_difference is None
    assert summary.service_lag is None


def test_latency_is_of_well_behaved_programs_from_their_arrival():
    rows = [program("good", 1.0, 1.0 + k) for k in range(1, 11)]
    summary = summarize(run_of(*TWO[:4], *rows, program("bad", 0.0, 11.9)))
    assert summary.well_behaved_p50_s == pytest.approx(5.0)
    assert summary.well_behaved_p99_s == pytest.approx(10.0)
    assert not summary.p99_at_least


def test_a_program_that_was_cut_off_counts_as_a_lower_bound():
    rows = [program("good", 0.0, 1.0), program("good", 2.0, None, "cancelled")]
    good = summarize(run_of(*rows)).clients["good"]
    assert good.p50 == Percentile(1.0, at_least=False)
    assert good.p99 == Percentile(10.0, at_least=True)
    assert (good.programs, good.finished) == (2, 1)
    assert [summarize(run_of(*rows)).p50_at_least, summarize(run_of(*rows)).p99_at_least] == [False, True]


def test_program_time_is_a_mean_of_clients_and_spread_how_unlike_they_are():
    clients = {"a": {"well_behaved": True}, "b": {"well_behaved": True}, "bad": {"well_behaved": False}}
    rows = [program("a", 0.0, 1.0), program("a", 0.0, 3.0), program("b", 0.0, 6.0), program("bad", 0.0, 11.0)]
    even = summarize(run_of(*rows, clients=clients))
    assert (even.program_mean_s, even.program_mean_at_least) == (pytest.approx((2 + 6) / 2), False)
    assert even.program_spread == pytest.approx(2 / 4)
    cut = summarize(run_of(*rows, program("b", 2.0, None, "cancelled"), clients=clients))
    assert cut.clients["b"].program_mean == Percentile((6 + 10) / 2, at_least=True)
    assert cut.program_mean_at_least
    assert summarize(run_of(*TWO)).program_spread is None, "of one client"


def test_a_failed_program_has_no_latency():
    summary = summarize(run_of(program("good", 0.0, 0.1, "failed")))
    assert summary.well_behaved_p50_s is None


def test_what_was_not_measured_is_none_and_printed_as_a_dash():
    blind = request("good", 0.0, 1.0, 2.0, cached_tokens=None)
    summary = summarize(run_of(TWO[0], blind))
    assert summary.hit_rate is None
    assert summary.actual_rate is None
    assert summary.jain_actual is None
    assert summary.service_rate == pytest.approx(10.0)
    nothing = summarize(run_of(request("good", 0.0, None, 2.0, outcome="failed", prompt_tokens=None)))
    assert nothing.jain is None
    assert nothing.hit_rate is None
    assert report.number(None) == report.DASH == "–"
    console = Console(width=200)
    with console.capture() as captured:
        console.print(report.comparison_table(rows([nothing])))
        console.print(report.client_table(nothing))
    assert "–" in captured.get()


def sampled(rounds: list[dict[str, tuple[float, int]]], worker: str = "r0", backlog: int = 0) -> list[Sample]:
    def row(service: float, waiting: int) -> dict[str, float]:
        return {"service": service, "waiting": waiting, "backlog": backlog}

    return [
        Sample(
            number, float(number), worker, {name: row(*seen) for name, seen in accounts.items()}, bound=70.0
        )
        for number, accounts in enumerate(rounds)
    ]


def test_difference_and_bound_come_from_the_replicas_where_they_were_asked():
    samples = sampled(
        [
            {"bad": (0, 1)},
            {"bad": (100, 1), "good": (0, 1)},  # both wait from here on
            {"bad": (130, 2), "good": (10, 1)},
            {"bad": (150, 1), "good": (70, 1)},  # to here: the gap grew by 20 and shrank by 40
            {"bad": (900, 1), "good": (70, 0)},
        ]
    )
    summary = summarize(run_of(*samples))
    assert summary.service_difference == 40
    assert summary.service_lag == 40, "`bad` waits throughout, and `good` caught up by 40"
    assert summary.backlog_s == pytest.approx(2.0)
    assert summary.bound == 70.0


def test_backlogged_is_waiting_at_every_replica():
    here = [{"bad": (0, 1), "good": (0, 1)}, {"bad": (50, 1), "good": (0, 1)}]
    there = [{"bad": (0, 1), "good": (0, 0)}, {"bad": (9, 1), "good": (0, 0)}]
    both = summarize(run_of(*sampled(here), *sampled(here, "r1"), workers=2))
    assert both.service_difference == 100
    assert both.bound == 140.0
    one = summarize(run_of(*sampled(here), *sampled(there, "r1"), workers=2))
    assert one.service_difference is None
    assert one.bound == 140.0
    unheard = summarize(run_of(*sampled(here), workers=2))
    assert unheard.service_difference is None
    assert unheard.bound is None


def test_a_queue_that_ran_dry_between_two_samples_was_not_backlogged():
    both = [{"bad": (0, 1), "good": (0, 1)}, {"bad": (50, 1), "good": (0, 1)}]
    dry = [replace(sample, round=1, t_s=1.0) for sample in sampled(both[1:], backlog=1)]
    assert summarize(run_of(*sampled(both[:1]), *dry)).service_difference is None


def test_records_are_read_as_they_were_written_and_bad_ones_are_named(tmp_path):
    path = tmp_path / "r.jsonl"
    with Records(path, manifest()) as records:
        for row in (*TWO, *sampled([{"bad": (1, 2)}]), End(12.0)):
            records.add(row)
    assert asdict(summarize(read(path))) == asdict(summarize(records.run))
    path.write_text(to_json(manifest()) + "\n{}\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:2"):
        read(path)
    path.write_text(to_json(End(1.0)) + "\n")
    with pytest.raises(ValueError, match="manifest"):
        read(path)


# ---- several runs


def summaries() -> list:
    """Two schedulers, two repeats each; `ours` twice as fast as `theirs`."""
    found = []
    for scheduler, speed in (("d2lpm+dlpm", 2.0), ("round_robin+lpm", 1.0)):
        for repeat in (0, 1):
            one = summarize(run_of(*TWO, scheduler=scheduler, workload="tot-s1", repeat=repeat))
            rates = {
                "throughput_tokens_per_s": speed * (10 + repeat),
                "well_behaved_p99_s": (4.0 + repeat) / speed,
            }
            found.append(replace(one, service_difference=None if repeat else 5.0, bound=None, **rates))
    return found


def test_rows_are_medians_over_repeats_of_what_was_measured():
    ours, theirs = rows(summaries())
    assert ours["throughput_tokens_per_s"] == pytest.approx(21.0)
    assert theirs["throughput_tokens_per_s"] == pytest.approx(10.5)
    assert ours["service_difference"] == 5.0
    assert ours["bound"] is None


def ratios_of(found: list) -> dict:
    return ratios(rows(found), "d2lpm+dlpm")["tot-s1"]


def test_ratios_are_to_the_best_of_the_others():
    found = ratios_of(summaries())
    assert found["throughput_tokens_per_s"] == pytest.approx(2.0)
    assert found["well_behaved_p99_s"] == pytest.approx(0.5)
    three = [*summaries(), replace(summaries()[2], scheduler="x", throughput_tokens_per_s=42.0)]
    assert ratios_of(three)["throughput_tokens_per_s"] == 0.5
    assert ratios_of(summaries()[:2])["jain"] is None


def test_there_is_no_ratio_of_a_latency_that_is_only_a_lower_bound():
    found = summaries()
    found[0] = replace(found[0], p99_at_least=True)
    assert ratios_of(found)["well_behaved_p99_s"] is None
    assert ratios_of(found)["well_behaved_p50_s"] is not None


def test_the_json_line_has_exactly_the_agreed_fields(tmp_path, capsys):
    case = CompareOptions(seed=7, json_file=tmp_path / "line.json")
    Comparison(case, None, Console()).show("compare", [], summaries(), x=1)
    line = capsys.readouterr().out.splitlines()[-1]
    assert (tmp_path / "line.json").read_text() == line + "\n"
    told = json.loads(line)
    assert list(told) == ["bench", "rows", "versions", "seed", "x"]
    assert (told["bench"], told["seed"]) == ("compare", 7)
    assert " ".join(told["rows"][0]) == (
        "scheduler workload throughput_tokens_per_s service_rate jain well_behaved_p50_s well_behaved_p99_s hit_rate "
        "service_difference bound"
    )
    assert told["rows"][0]["bound"] is None


# ---- the comparison's plan


def test_schedulers_take_turns_so_that_each_has_the_same_mean_place():
    names = list(SCHEDULERS)
    turned = turns(names, 2)
    assert sorted(turned) == sorted((repeat, name) for repeat in (0, 1) for name in names)
    places = {name: [place for place, turn in enumerate(turned) if turn[1] == name] for name in names}
    assert {sum(place) for place in places.values()} == {len(turned) - 1}
    assert turned[3][1] == turned[4][1], "one cluster serves both sides of the turn"
    assert turns(names, 4)[8] != turns(names, 4)[0], "the second pair begins elsewhere"


def test_the_command_that_starts_a_cluster():
    settings = table.Cluster(
        replicas=3, model="bench", quantum=300.0, extra=("--max-running-requests", "8"), start_timeout_s=9.5
    )
    program, command, *words = SpawnCluster(settings, Path("logs"), command=("x",)).arguments("preble", "lpm")
    assert (program, command) == ("x", "cluster")
    assert parse("cluster", words) == replace(
        settings, placement="preble", policy="lpm", port=0, json=True, dashboard="off"
    )


@pytest.mark.slow
def test_a_comparison_runs_from_nothing_to_its_json_line_and_resumes_where_it_was_cut_off(
    tmp_path, capsys, monkeypatch
):
    pretended, folder = Peer(make_tokenizer(tmp_path), step_s=5e-4), tmp_path / "results"
    monkeypatch.setattr("workloads.compare.spawn", lambda *_: pretended.start)
    words = "--schedulers d2lpm+dlpm,round_robin+lpm --workloads judge-s1 --duration 2 --repeats 2 --drain 2"
    words += f" --model {tmp_path} --load 0.05 --article-tokens 40 --judgement-tokens 2 --replicas 1"
    with pretended.serve():
        assert compare_main([*words.split(), "--out", str(folder)]) == 0
        # Repeats turn around: the second scheduler's cluster serves both of its runs.
        assert pretended.starts == [("d2lpm", "dlpm"), ("round_robin", "lpm"), ("d2lpm", "dlpm")]
        first = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert [row["scheduler"] for row in first["rows"]] == ["d2lpm+dlpm", "round_robin+lpm"]
        assert all(row["throughput_tokens_per_s"] > 0 for row in first["rows"])
        assert {row["bound"] for row in first["rows"]} == {50.0}
        arrivals = [
            [(p.client, p.program, p.t_intended_s) for p in sorted(read(path).programs, key=str)]
            for path in sorted((folder / "records").glob("judge-s1.*.0.jsonl"))
        ]
        assert sorted(arrivals[0]) == sorted(arrivals[1]), "both schedulers see the same arrivals"

        cut_off = folder / "records" / "judge-s1.round_robin+lpm.1.jsonl"
        cut_off.write_text("".join(cut_off.read_text().splitlines(keepends=True)[:3]))
        del pretended.starts[:]
        assert compare_main([*words.split(), "--out", str(folder)]) == 2
        assert f"--resume {folder} goes on with it" in capsys.readouterr().err
        assert not pretended.starts, "another comparison's records are not taken for this one's"
        assert compare_main(["--resume", str(folder)]) == 0
        assert pretended.starts == [("round_robin", "lpm")]
    plots = {path.name: path.read_bytes()[:4] for path in folder.glob("*.png")}
    assert plots == dict.fromkeys(("judge-s1-service.png", "judge-s1-latency.png"), b"\x89PNG")
    told = json.loads((folder / "summary.json").read_text())
    assert len(told["runs"]) == 4


def test_a_cluster_with_another_policy_or_placement_makes_the_run_void(tmp_path):
    pretended = Peer(make_tokenizer(tmp_path))
    with pretended.serve(), pretended.start("d2lpm", "lpm") as cluster:
        assert verify(cluster, "d2lpm", "lpm")["replicas"]["r0"]["policy"] == "lpm"
        with pytest.raises(ClusterError, match="schedules by 'lpm', not 'dlpm': the run is void"):
            verify(cluster, "d2lpm", "dlpm")
        with pytest.raises(ClusterError, match="places by 'd2lpm', not 'preble'"):
            verify(cluster, "preble", "lpm")


def test_a_cluster_that_does_not_start_says_why(tmp_path):
    script = tmp_path / "cluster.py"
    script.write_text("import sys; print('port 8000 is in use', file=sys.stderr); sys.exit(3)")
    spawn = SpawnCluster(table.Cluster(), tmp_path / "logs", command=(sys.executable, str(script)))
    with (
        pytest.raises(ClusterError, match="status 3; its last words: port 8000 is in use"),
        spawn("d2lpm", "dlpm"),
    ):
        pass


def test_a_cluster_is_asked_to_end(tmp_path):
    script = tmp_path / "cluster.py"
    script.write_text(
        "import json, pathlib, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print(json.dumps({'gateway': 'http://g', 'replicas': ['http://r']}), flush=True)\n"
        f"signal.sigwait([signal.SIGTERM])\npathlib.Path({str(tmp_path / 'ended')!r}).touch()\n"
    )
    spawn = SpawnCluster(table.Cluster(), tmp_path / "logs", command=(sys.executable, str(script)))
    with spawn("d2lpm", "dlpm") as cluster:
        assert (cluster.gateway, cluster.replicas) == ("http://g", ("http://r",))
    assert (tmp_path / "ended").exists()
