"""`sglang-fair bench gateway`: what it makes of its rounds; and shortly, where sglang-router is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fair.bench.gateway import OURS, THEIRS, Gateway, Load, Plan, Rounds

PLAN = Plan(rates=(50.0,), seconds=1.0, seed=1, sglang_router="smg", rounds=3, workers=(1, 2))


def rounds_of(loads: dict[str, list[tuple[float, float]]], added: dict[str, list[float]]) -> Rounds:
    """Of each gateway, by round, requests per second and all CPU per request; what it adds."""
    workers = {OURS: 1, f"{OURS} x2": 2, THEIRS: 0}
    rounds = Rounds(PLAN, [Gateway(name, 0, (), workers[name]) for name in loads])
    for name, each in loads.items():
        rounds.loads[name] = [Load(rps, 0.5 * cpu, cpu, 64 * rps, cpu, 0) for rps, cpu in each]
        rounds.added[name, 50.0] = [(p50, 2 * p50, 0) for p50 in added[name]]
    return rounds


def test_a_ratio_is_of_numbers_of_one_round() -> None:
    """A machine that is slow in one round is slow for all: the median of ratios does not see it."""
    loads = {
        OURS: [(100.0, 1.0), (10.0, 10.0), (120.0, 1.0)],
        THEIRS: [(200.0, 0.5), (20.0, 5.0), (200.0, 0.5)],
    }
    [ratio] = rounds_of(loads, {OURS: [2.0, 30.0, 3.0], THEIRS: [1.0, 10.0, 1.0]}).ratios()
    assert (ratio["gateway"], ratio["max_rps"], ratio["cpu_ms_per_request"]) == (OURS, 0.5, 2.0)
    assert ratio["added_ms_p50"] == {"50": 3.0}
    assert rounds_of({OURS: loads[OURS]}, {OURS: [2.0, 30.0, 3.0]}).ratios() == []


def test_what_is_linear_is_bounded_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes can serve twice as much as one only where there are cores for engine and bench, too."""
    monkeypatch.setattr("sglang_fair.bench.gateway.cores", lambda: 2)
    added = {OURS: [1.0], f"{OURS} x2": [1.0]}
    few = rounds_of({OURS: [(1000.0, 1.25)], f"{OURS} x2": [(1440.0, 1.3)]}, added)
    assert [row.of_linear for row in few.rows()] == [None, 0.9]  # of 2 cores / 1.25 ms = 1,600
    many = rounds_of({OURS: [(1000.0, 0.5)], f"{OURS} x2": [(1800.0, 0.5)]}, added)
    assert [row.of_linear for row in many.rows()] == [None, 0.9]  # of 2 x 1,000


@pytest.mark.slow
def test_the_last_line_says_what_was_measured_and_what_is_absent(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "sglang_fair.cli", "bench", "gateway", "--seconds", "0.3", "--rates", "20,40",
        "--rounds", "2", "--gateway-workers", "1", "--sglang-router", str(tmp_path / "smg"),
        "--json", str(tmp_path / "result.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == (tmp_path / "result.json").read_text().strip()
    result = json.loads(last)
    assert result["bench"] == "gateway"
    *ours, other = result["rows"]
    assert [(row["gateway"], row["rate_rps"], row["failed"]) for row in ours] == [
        ("ours", 20, 0),
        ("ours", 40, 0),
    ]
    for row in ours:
        assert row["max_rps"] > 0
        assert row["stream_tokens_per_s"] > row["max_rps"]
        assert row["cpu_ms_per_request"] > 0
        assert row["all_cpu_ms_per_request"] > row["cpu_ms_per_request"]
        assert row["cpu_us_per_token"] > 0
        assert row["added_ms_p99"] >= row["added_ms_p50"] - 50
    assert (other["gateway"], other["absent"], other["max_rps"]) == ("sglang-router", True, None)
    assert result["ratios"] == []
    assert result["rounds"] == 2
    assert {"commit", "python", "uvicorn", "tokenizers"} <= result["versions"].keys()
