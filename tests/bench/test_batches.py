"""The bench of batches: a short run ends with one line of JSON, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fair.cli import BENCHES


@pytest.mark.slow
def test_a_short_run_ends_with_one_line_of_json(tmp_path: Path) -> None:
    file, folder = tmp_path / "batches.json", tmp_path / "disk"
    folder.mkdir()
    command = [
        "-m",
        BENCHES["batches"].module,
        "--items",
        "4000",
        "--json",
        str(file),
        "--batches",
        str(folder),
    ]
    ended = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=True
    )
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert (result["bench"], result["items"]) == ("batches", 4_000)
    assert min(result["accept_per_s"], result["feed_per_s"]) > 0
    assert list(folder.iterdir()) == []
