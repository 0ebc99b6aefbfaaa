"""`sglang-fair bench gateway`, shortly, where sglang-router is not installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_last_line_says_what_was_measured_and_what_is_absent(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "sglang_fair.cli",
        "bench",
        "gateway",
        "--seconds",
        "0.5",
        "--rates",
        "20,40",
    ]
    command += ["--sglang-router", str(tmp_path / "smg"), "--json", str(tmp_path / "result.json")]
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
        assert row["added_ms_p99"] >= row["added_ms_p50"] - 50
    assert (other["gateway"], other["absent"], other["max_rps"]) == ("sglang-router", True, None)


@pytest.mark.parametrize("wrong", [["--rates", "x"], ["--rates", "0"], ["--seconds", "-1"], ["--no-such"]])
def test_bad_arguments_are_refused(wrong: list[str]) -> None:
    command = [sys.executable, "-m", "sglang_fair.bench.gateway", *wrong]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert not done.stdout


def test_a_router_that_does_not_start_is_shown_with_its_last_words(tmp_path: Path) -> None:
    program = tmp_path / "sglang-router"
    program.write_text("#!/bin/sh\necho starting\necho 'error: no such policy' >&2\nexit 3\n")
    program.chmod(0o755)
    command = [sys.executable, "-m", "sglang_fair.bench.gateway", "--seconds", "0.3", "--rates", "20"]
    command += ["--sglang-router", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert not done.stdout
    *_, said = done.stderr.split("sglang-fair bench gateway: ")
    assert said.startswith(f"{program} launch --host 127.0.0.1 --port ")
    assert ": ended with exit code 3\n    starting\n    error: no such policy\n" in said
