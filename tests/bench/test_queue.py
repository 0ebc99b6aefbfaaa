"""The bench of the queues: its problem is hard, and a short run ends with one line of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from router.placement.qlm.problem import edf, worth
from sglang_fair.bench.queue import PLACEMENTS, SIZES, Site, a_problem
from sglang_fair.cli import BENCHES


def test_problems_and_requests_are_the_same_for_the_same_seed():
    assert a_problem(20, 4, 1) == a_problem(20, 4, 1) != a_problem(20, 4, 2)
    one, other = Site("deadline", 1), Site("qlm", 1)
    assert [one.request() for _ in range(5)] == [other.request() for _ in range(5)]


def test_the_problems_cannot_be_solved_by_edf():
    for groups, queues in SIZES:
        problem = a_problem(groups, queues, 1)
        assert worth(problem, edf(problem)).late_s > 50


@pytest.mark.slow
def test_a_short_run_ends_with_one_line_of_json(tmp_path: Path):
    file = tmp_path / "queue.json"
    ended = subprocess.run(
        [sys.executable, "-m", BENCHES["queue"].module, "--requests", "2000", "--json", str(file)],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert (result["bench"], result["requests"]) == ("queue", 2_000)
    assert [(one["groups"], one["queues"]) for one in result["plans"]] == list(SIZES)
    for one in result["plans"]:
        assert one["late_s"] <= one["edf_late_s"]
        assert one["plan_s"] > 0
    for name in PLACEMENTS:
        assert {"pull_us_p99", "arrive_us_p99", "end_us_p99", "look_ms", "bytes_per_request"} < set(
            result[name]
        )
    assert result["deadline"]["look_ms"] > 0
