"""The soak's arithmetic, and a short soak of a real cluster."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.budget import is_night
from tests.support.fork_server import PREFIX
from workloads.soak import MIB, MemorySample, ProcessMemory, growth_per_h, kind_of, main, rows, table


def test_growth_is_the_median_slope_and_outliers_do_not_move_it():
    times = [10.0 * n for n in range(60)]
    flat = [500.0] * 60
    flat[7] = flat[31] = 900.0
    assert growth_per_h(times, flat) == 0
    assert growth_per_h(times, [500 + t / 360 for t in times]) == pytest.approx(10)
    assert growth_per_h(times[:9], flat[:9]) is None


def test_rows_leave_out_the_warm_up_and_processes_that_came_or_went():
    samples = [
        MemorySample(at_s=float(n), resident_bytes={"router 1": (100 if n < 20 else 200) * MIB} | extra)
        for n in range(101)
        for extra in ([{"gateway 1": MIB}] if n > 50 else [{}])
    ]
    assert rows(samples) == [ProcessMemory("router 1", 200.0, 200.0, 0.0)]
    assert rows([]) == []
    assert "router 1" in table(rows(samples))


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["python", "-m", "router.gateway", "--port", "1"], "gateway"),
        (["python", "-m", "router", "--bind", "tcp://127.0.0.1:1"], "router"),
        (["sglang::scheduler"], "replica's scheduler"),
        (["python", "-m", "sglang_fair.engines.replica", "--port", "1"], "replica's server"),
        (["sglang-fair replica --device cpu"], "replica's server"),
        (["python", "-m", "sglang_fair.engines.fork_server", "a/name"], "fork server"),
        (["python", "-c", "from multiprocessing.resource_tracker import main"], None),
    ],
)
def test_processes_are_known_by_their_command_lines(command, kind):
    assert kind_of(command) == kind


def test_bad_arguments_are_refused(capsys):
    assert main(["--rate", "0"]) == 2
    said = capsys.readouterr().err
    assert said == "sglang-fair bench soak: --minutes, --rate, --every and --replicas must be positive\n"


@pytest.mark.e2e
@pytest.mark.skipif(not is_night(), reason="a soak is for the night")
@pytest.mark.timeout(700)
def test_a_short_soak_answers_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PREFIX)  # the processes are sought below the cluster's
    command = [sys.executable, *f"-m workloads.soak --minutes 0.3 --every 1 --logs {tmp_path}".split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ok"]
    assert result["requests"]["sent"] == 180
    assert result["requests"]["answered"] + result["requests"]["hung up"] == 180
    kinds = {row["process"].rsplit(" ", 1)[0] for row in result["rows"]}
    assert {"router", "gateway", "replica's scheduler"} <= kinds
