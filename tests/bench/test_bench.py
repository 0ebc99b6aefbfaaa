"""The scheduler benchmark: its cases and tables, and one short run on SGLang's real scheduler."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.bench import carry_out, gateway, percentile, queue, router
from sglang_fair.cli import BENCHES
from sglang_fair.engines.bench import scheduler
from sglang_fair.engines.bench.scheduler import Prompts, QueueShape, table
from sglang_fair.settings.commands import run


def row(policy: str, queued: int, step_ms: float) -> dict[str, Any]:
    shape = {"queued": queued, "clients": 10, "prompt_tokens": 1000}
    return {"policy": policy, **shape, "step_ms_p50": step_ms, "step_ms_p99": 2 * step_ms, "arrival_us": 5.0}


def test_prompts_are_the_same_for_the_same_seed_and_share_their_first_half():
    shape = QueueShape(queued=128, clients=10, prompt_tokens=200)
    first, again, other = (iter(Prompts(shape, seed)) for seed in (1, 1, 2))
    drawn = [next(first) for _ in range(50)]
    assert drawn == [next(again) for _ in range(50)]
    assert drawn != [next(other) for _ in range(50)]
    prefixes = [prefix.tobytes() for prefix in Prompts(shape, 1).prefixes]
    assert all(len(prompt) == 200 and prompt[:100].tobytes() in prefixes for _, prompt in drawn)
    assert len({client for client, _ in drawn}) == 10


def test_the_table_has_a_line_per_policy_and_marks_what_was_not_measured():
    text = table([row("dlpm", 128, 0.5), row("dlpm", 1000, 0.75), row("sglang:lpm", 128, 2.0)])
    lines = text.splitlines()
    assert next(line for line in lines if line.startswith("dlpm")).split() == [
        "dlpm", "0.50", "(1.00)", "0.75", "(1.50)",
    ]  # fmt: skip
    assert next(line for line in lines if line.startswith("sglang:lpm")).split()[-1] == "-"


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


@pytest.mark.engine
def test_a_short_run_ends_with_one_line_of_json(tmp_path: Path):
    file = tmp_path / "rows.json"
    ended = subprocess.run(
        [
            sys.executable, "-m", BENCHES["scheduler"].module,
            "--policies", "sglang:fcfs,sglang:lpm,dlpm", "--queued", "20,200", "--clients", "10",
            "--prompt-tokens", "200", "--steps", "10", "--json", str(file),
        ],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert result["bench"] == "scheduler"
    assert result["cache"] == ["UnifiedRadixCache", "RustUnifiedTreeCore"]
    assert result["seed"] == 1
    assert [(row["policy"], row["queued"]) for row in result["rows"]] == [
        ("sglang:fcfs", 20), ("sglang:lpm", 20), ("dlpm", 20),
        ("sglang:fcfs", 200), ("sglang:lpm", 200), ("dlpm", 200),
    ]  # fmt: skip
    for row in result["rows"]:
        assert 0 < row["step_ms_p50"] <= row["step_ms_p99"]
        assert row["steps"] == 10
    shares = {(row["policy"], row["queued"]): row["cached_tokens_share"] for row in result["rows"]}
    assert shares["dlpm", 200] > 0.3


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
