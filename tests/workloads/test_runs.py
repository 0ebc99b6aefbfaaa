"""Cases and runs of comparisons, and the pool that carries runs out."""

import os
import time
from dataclasses import replace

import pytest

from workloads.records import End, Manifest, Records
from workloads.runs import options
from workloads.runs.case import LOADS, ComparedRun, parts
from workloads.runs.live import LiveCase
from workloads.runs.pool import Failed, Pool
from workloads.simulation.comparison import SimulatedCase


def double(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    if number == 13:
        os._exit(7)
    time.sleep(0.01 * (number == 1))
    return 2 * number


@pytest.mark.slow
def test_a_job_that_fails_or_kills_its_worker_fails_alone():
    with Pool(1) as pool:
        ended = dict(pool.carry_out(double, [13, -1, 3]))
        assert [one.measured for _, one in pool.carry_out(double, [5])] == [10], "a pool may be used again"
        assert (ended[3].measured, ended[-1].error) == (6, "ValueError: -1 is negative")
        assert ended[13] == Failed("its process died with exit code 7")
        assert "double" in ended[-1].trace


def test_the_rate_follows_from_the_capacity():
    for case in (LiveCase(), SimulatedCase()):
        rates = case.with_capacity("tot-s1", 8.0).with_capacity("judge-s1", 4.0).rates_per_s
        assert rates == {"tot-s1": LOADS["tot"] * 8 / 4, "judge-s1": LOADS["judge"] * 4 / 4}
        assert replace(case, load=0.5).with_capacity("tot-s1", 8.0).rates_per_s == {"tot-s1": 1.0}


def test_a_run_is_recorded_when_its_records_have_an_end(tmp_path):
    run = ComparedRun("tot-s1", "d2lpm+dlpm D=2", 1)
    path = run.path(tmp_path)
    assert path == tmp_path / "records" / "tot-s1.d2lpm+dlpm.D=2.1.jsonl"
    assert not run.is_recorded(tmp_path)
    with Records(path, Manifest("tot-s1", "x", {}, 1.0)) as records:
        assert not run.is_recorded(tmp_path)
        records.add(End(1.0))
    assert run.is_recorded(tmp_path)


def test_a_scheduler_is_a_placement_and_a_policy():
    assert parts("preble+lpm") == ("preble", "lpm")
    for wrong in ("preble", "lpm+preble", "preble+best"):
        with pytest.raises(ValueError, match="unknown scheduler"):
            parts(wrong)


def test_values_of_options_are_read_or_refused_in_one_line():
    assert options.names("a,b,,a") == ("a", "b")
    assert options.numbers("--quantum", "1, 2.5") == (1.0, 2.5)
    assert options.rates("tot-s1=0.5") == {"tot-s1": 0.5}
    for wrong in (
        lambda: options.numbers("--quantum", "many"),
        lambda: options.rates("tot-s1"),
        lambda: options.rates("tot-s1=1,tot-s1=2"),
        lambda: options.rates("tot-s1=many"),
        lambda: options.options_by_name("--policy-options", ["patience=64"]),
    ):
        with pytest.raises(ValueError, match=r"^--[^\n]+$"):
            wrong()
