"""`sglang-fair bench gateway`: a short run ends with one line of JSON."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_the_last_line_has_what_was_measured(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "sglang_fair.cli", "bench", "gateway", "--seconds", "1", "--rounds", "1",
        "--json", str(tmp_path / "result.json"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == (tmp_path / "result.json").read_text().strip()
    result = json.loads(last)
    assert (result["bench"], result["rounds"]) == ("gateway", 1)
    row = result["row"]
    assert row["failed"] == 0
    assert row["stream_tokens_per_s"] > row["max_rps"] > 0
    assert row["cpu_ms_per_request"] > 0
    assert row["cpu_us_per_token"] > 0
    assert row["added_ms_p99"] >= row["added_ms_p50"]
