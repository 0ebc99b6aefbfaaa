"""The benchmarks of our own cost: their traffic, a short run of each, and how one ends."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from router.placement.qlm.problem import edf, worth
from sglang_fair.bench import carry_out, gateway, percentile, queue, router
from sglang_fair.cli import BENCHES
from sglang_fair.engines.bench import scheduler
from sglang_fair.engines.bench.scheduler import Prompts, QueueShape
from sglang_fair.settings.commands import run
from tests.support.envoy import envoy_program
from tests.support.tree_check import check


def test_prompts_are_the_same_for_the_same_seed_and_share_their_first_half():
    shape = QueueShape(queued=128, clients=10, prompt_tokens=200)
    first, again, other = (iter(Prompts(shape, seed)) for seed in (1, 1, 2))
    drawn = [next(first) for _ in range(50)]
    assert drawn == [next(again) for _ in range(50)]
    assert drawn != [next(other) for _ in range(50)]
    prefixes = [prefix.tobytes() for prefix in Prompts(shape, 1).prefixes]
    assert all(len(prompt) == 200 and prompt[:100].tobytes() in prefixes for _, prompt in drawn)
    assert len({client for client, _ in drawn}) == 10


LENGTHS = (200, 1_000)


def test_percentiles_are_by_nearest_rank():
    assert [percentile([3, 1, 2, 4], percent) for percent in (1, 25, 26, 50, 99, 100)] == [1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (scheduler.main, ["--queued", "0"]),
        (scheduler.main, ["--prompt-tokens", "20000"]),
        (scheduler.main, ["--clients", "x"]),
        (scheduler.main, ["--policies", "sjf"]),
        (router.main, ["--workers", "0"]),
        (router.main, ["--tree-tokens", "1000"]),
        (router.main, ["--placements", "luck"]),
        (queue.main, ["--requests", "0"]),
        (gateway.main, ["--rounds", "0"]),
        (gateway.main, ["--no-such"]),
    ],
)
def test_bad_arguments_are_refused_in_one_line(
    main: Callable[..., None], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main, "sglang-fair bench x", arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sglang-fair bench x: ")


# ---- short runs


def short_run(bench: str, folder: Path, *words: str) -> dict[str, Any]:
    """Its last line, which is also its file."""
    file = folder / "result.json"
    command = [sys.executable, "-m", BENCHES[bench].module, *words, "--json", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert result["bench"] == bench
    return result


@pytest.mark.engine
def test_the_scheduler(tmp_path: Path) -> None:
    policies = ("sglang:fcfs", "sglang:lpm", "dlpm")
    result = short_run(
        "scheduler", tmp_path, "--policies", ",".join(policies), "--queued", "20,200", "--clients", "10",
        "--prompt-tokens", "200", "--known", "50", "--steps", "10", "--rounds", "2",
    )  # fmt: skip
    assert result["cache"] == ["UnifiedRadixCache", "RustUnifiedTreeCore"]
    assert result["seed"] == 1
    assert [(row["policy"], row["queued"]) for row in result["rows"]] == [
        (policy, queued) for queued in (20, 200) for policy in policies
    ]
    for row in result["rows"]:
        assert 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["step_ms_p50"] + row["build_ms_p50"] < row["turn_ms_p99"]
        assert row["turn_ms_min"] <= row["turn_ms_p50"] == min(row["rounds_ms"])
        assert (row["steps"], len(row["rounds_ms"]), row["known"]) == (10, 2, 50)
    shares = {(row["policy"], row["queued"]): row["cached_tokens_share"] for row in result["rows"]}
    assert shares["dlpm", 200] > 0.3


@pytest.mark.slow
def test_the_router(tmp_path: Path) -> None:
    result = short_run(
        "router", tmp_path, "--placements", "round_robin,d2lpm", "--workers", "2,3", "--prompt-tokens", "200,1000",
        "--tree-tokens", "50000", "--decisions", "10",
    )  # fmt: skip
    assert {"seed", "versions", "machine", "bytes_per_token", "event_tokens_per_s"} < set(result)
    assert [(row["placement"], row["workers"], row["prompt_tokens"]) for row in result["rows"]] == [
        (placement, workers, tokens)
        for workers in (2, 3)
        for placement in ("round_robin", "d2lpm")
        for tokens in (200, 1000)
    ]
    keys = {"placement", "prompt_tokens", "workers", "decisions_per_s", "us_p50", "us_p99"}
    assert all(keys < set(row) for row in result["rows"])


@pytest.mark.slow
def test_the_queues(tmp_path: Path) -> None:
    result = short_run("queue", tmp_path, "--requests", "2000")
    assert result["requests"] == 2_000
    assert [(one["groups"], one["queues"]) for one in result["plans"]] == list(queue.SIZES)
    for one in result["plans"]:
        assert one["late_s"] <= one["edf_late_s"]
        assert one["plan_s"] > 0
    measured = {"pull_us_p99", "arrive_us_p99", "end_us_p99", "look_ms", "bytes_per_request"}
    assert all(measured < set(result[name]) for name in queue.PLACEMENTS)
    assert result["deadline"]["look_ms"] > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_the_gateway(tmp_path: Path) -> None:
    pytest.importorskip("grpclib", reason="no sglang-fair[picker]")
    result = short_run("gateway", tmp_path, "--seconds", "1", "--rounds", "1", "--envoy", envoy_program())
    assert result["rounds"] == 1
    for row in (result["row"], result["picker"]):
        assert row["failed"] == 0
        assert row["stream_tokens_per_s"] > row["max_rps"] > 0
        assert row["cpu_ms_per_request"] > 0
        assert row["cpu_us_per_token"] > 0
        assert row["added_ms_p99"] >= row["added_ms_p50"]
    assert result["envoy"]["cpu_ms_per_request"] == 0 < result["envoy"]["envoy_cpu_ms_per_request"]


# ---- what is measured


def test_the_problems_of_the_queues_are_seeded_and_cannot_be_solved_by_edf() -> None:
    assert queue.a_problem(20, 4, 1) == queue.a_problem(20, 4, 1) != queue.a_problem(20, 4, 2)
    one, other = queue.Site("deadline", 1), queue.Site("qlm", 1)
    assert [one.request() for _ in range(5)] == [other.request() for _ in range(5)]
    for groups, queues in queue.SIZES:
        problem = queue.a_problem(groups, queues, 1)
        assert worth(problem, edf(problem)).late_s > 50


def test_traffic_of_the_router_is_the_same_for_the_same_seed():
    first, again, other = (router.Traffic(seed, 8, LENGTHS) for seed in (1, 1, 2))
    drawn = [list(islice(traffic.conversations(), 10)) for traffic in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert first.request(200) == again.request(200)


def test_a_prompt_is_a_cached_head_and_as_much_of_its_own():
    traffic = router.Traffic(1, 8, LENGTHS)
    for prompt_tokens in LENGTHS:
        arrive, head = traffic.request(prompt_tokens)
        assert len(arrive.tokens) == 4 * prompt_tokens
        assert arrive.tokens.startswith(head.tokens)
        assert len(head.tokens) // 4 == prompt_tokens // 2 - prompt_tokens // 2 % router.PAGE
        assert len(head.hashes) * router.PAGE * 4 == len(head.tokens)


@pytest.mark.slow
def test_the_tree_is_filled_to_its_size_and_decisions_keep_it_there():
    traffic = router.Traffic(1, 4, LENGTHS)
    routed, rate = router.filled("d2lpm", traffic, 60_000)
    assert 59_000 < routed.tree.tokens <= 60_000
    assert rate > 0
    check(routed.tree)
    found = router.measure(routed, traffic, 1_000, decisions=100, warm_up=20)
    check(routed.tree)
    assert routed.state()["in_flight"] == 0
    assert routed.tree.tokens <= 60_000
    assert routed.tree.evicted_tokens > 0
    assert found["placement"] == "d2lpm"
    assert 0 < found["us_p50"] <= found["us_p99"] <= found["us_max"]
    assert 0.2 < found["matched_share"] < 0.5


# ---- how a bench ends


def refuse(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("measured", "place", "code", "out", "last"),
    [
        (lambda: {"a": 1}, "sub/out.json", 0, '{"a":1}\n', "begun"),
        (lambda: {"a": 1}, "file/out.json", 2, '{"a":1}\n', "sglang-fair bench x: [Errno "),
        (lambda: refuse(ValueError("bad")), "out.json", 2, "", "sglang-fair bench x: bad"),
        (lambda: refuse(KeyboardInterrupt()), "out.json", 130, "", "sglang-fair bench x: interrupted"),
    ],
)
def test_a_bench_ends_in_its_result_a_line_or_130(
    measured: Callable[[], Any], place: str, code: int, out: str, last: str, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "file").touch()

    def bench(show: Callable[[str], None]) -> Any:
        show("begun")
        return measured()

    def main() -> None:
        carry_out(bench, tmp_path / place)

    assert run(main, "sglang-fair bench x", []) == code
    said = capsys.readouterr()
    assert said.out == out
    assert said.err.splitlines()[0] == "begun"
    assert said.err.splitlines()[-1].startswith(last)
    assert (tmp_path / place).exists() == (code == 0)
