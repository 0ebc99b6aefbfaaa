"""The bench of batches: a short run ends with one line of JSON, and leaves nothing behind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_fair.bench.batches import BATCHES
from sglang_fair.cli import BENCHES


@pytest.mark.slow
def test_a_short_run_ends_with_one_line_of_json(tmp_path: Path) -> None:
    file, folder = tmp_path / "batches.json", tmp_path / "disk"
    folder.mkdir()
    ended = subprocess.run(
        [
            sys.executable, "-m", BENCHES["batches"].module, "--quick", "--items", "4000", "--json", str(file),
            "--folder", str(folder),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result == json.loads(file.read_text())
    assert (result["bench"], result["items"], result["rows"]) == ("batches", 4_000, BATCHES)
    assert result["items_in_rows"] == 4_000
    assert result["upload_mb"] >= 100
    assert list(folder.iterdir()) == []
