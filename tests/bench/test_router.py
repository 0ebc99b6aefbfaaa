"""The router benchmark: seeded traffic, its table, and a short run that ends with one line of JSON."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.bench.router import PAGE, Traffic, filled, measure, table
from sglang_fair.cli import BENCHES
from tests.support.tree_check import check

LENGTHS = (200, 1_000)


def row(placement: str, prompt_tokens: int, rate: float) -> dict[str, Any]:
    times = {"decisions_per_s": rate, "us_p50": 10.0, "us_p99": 20.0}
    return {"placement": placement, "prompt_tokens": prompt_tokens, "workers": 8, **times}


def test_traffic_is_the_same_for_the_same_seed():
    first, again, other = (Traffic(seed, 8, LENGTHS) for seed in (1, 1, 2))
    drawn = [list(islice(traffic.conversations(), 10)) for traffic in (first, again, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert first.request(200) == again.request(200)


def test_a_prompt_is_a_cached_head_and_as_much_of_its_own():
    traffic = Traffic(1, 8, LENGTHS)
    for prompt_tokens in LENGTHS:
        arrive, head = traffic.request(prompt_tokens)
        assert len(arrive.tokens) == 4 * prompt_tokens
        assert arrive.tokens.startswith(head.tokens)
        assert len(head.tokens) // 4 == prompt_tokens // 2 - prompt_tokens // 2 % PAGE
        assert len(head.hashes) * PAGE * 4 == len(head.tokens)


@pytest.mark.slow
def test_the_tree_is_filled_to_its_size_and_decisions_keep_it_there():
    traffic = Traffic(1, 4, LENGTHS)
    router, rate = filled("d2lpm", traffic, 60_000)
    assert 59_000 < router.tree.tokens <= 60_000
    assert rate > 0
    check(router.tree)
    found = measure(router, traffic, 1_000, decisions=100, warm_up=20)
    check(router.tree)
    assert router.state()["in_flight"] == 0
    assert router.tree.tokens <= 60_000
    assert router.tree.evicted_tokens > 0
    assert found["placement"] == "d2lpm"
    assert 0 < found["us_p50"] <= found["us_p99"] <= found["us_max"]
    assert 0.2 < found["matched_share"] < 0.5


def test_the_table_has_a_line_per_placement_and_marks_what_was_not_measured():
    lines = table([row("d2lpm", 200, 1234.5), row("d2lpm", 1000, 999.0), row("preble", 200, 10.0)]).split(
        "\n"
    )
    found = next(line for line in lines if line.startswith("d2lpm")).split("  ")
    assert [cell.strip() for cell in found if cell] == ["d2lpm", "1,234 (10 / 20)", "999 (10 / 20)"]
    assert next(line for line in lines if line.startswith("preble")).split()[-1] == "-"


@pytest.mark.slow
def test_a_short_run_ends_with_one_line_of_json(tmp_path: Path):
    file = tmp_path / "rows.json"
    ended = subprocess.run(
        [
            sys.executable, "-m", BENCHES["router"].module, "--placements", "round_robin,d2lpm", "--workers", "2,3",
            "--prompt-tokens", "200,1000", "--tree-tokens", "50000", "--decisions", "10", "--json", str(file),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert result["bench"] == "router"
    assert {"seed", "versions", "machine", "bytes_per_token", "event_tokens_per_s"} < set(result)
    assert [(row["placement"], row["workers"], row["prompt_tokens"]) for row in result["rows"]] == [
        (placement, workers, tokens)
        for workers in (2, 3)
        for placement in ("round_robin", "d2lpm")
        for tokens in (200, 1000)
    ]
    keys = {"placement", "prompt_tokens", "workers", "decisions_per_s", "us_p50", "us_p99"}
    assert all(keys < set(row) for row in result["rows"])
