"""Cases, rates and cells of comparisons, and the processes that carry runs out."""

import os
import time

import pytest

from workloads.clients import Scale
from workloads.compare import CompareOptions
from workloads.records import Cell
from workloads.runs import comparison
from workloads.runs.comparison import LOADS, parts, rate_at
from workloads.runs.pool import Failed, carry_out


def double(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} is negative")
    if number == 13:
        os._exit(7)
    time.sleep(0.01 * (number == 1))
    return 2 * number


@pytest.mark.slow
def test_a_job_that_fails_or_kills_its_worker_fails_alone():
    ended = dict(carry_out(double, [13, -1, 3], 1))
    assert (ended[3].measured, ended[-1].error) == (6, "ValueError: -1 is negative")
    assert ended[13] == Failed("its process died")
    assert "double" in ended[-1].trace


def test_the_rate_follows_from_the_capacity():
    scale = Scale(good_clients=3)
    assert rate_at(8.0, "tot-s1", scale) == LOADS["tot"] * 8 / 4
    assert rate_at(4.0, "judge-s1", scale) == LOADS["judge"] * 4 / 4
    assert rate_at(8.0, "tot-s1", scale, load=0.5) == 1.0


def test_a_case_refuses_unknown_names():
    with pytest.raises(
        ValueError, match="unknown scheduler 'best': it is PLACEMENT\\+POLICY, of the placements d2lpm"
    ):
        CompareOptions(schedulers="best")
    with pytest.raises(ValueError, match="no scheduler"):
        CompareOptions(schedulers="")
    assert CompareOptions(schedulers="least_tokens+dlpm-predict").repeats == 2
    with pytest.raises(ValueError, match="unknown workload"):
        CompareOptions(workloads="tot")


def test_a_cell_has_a_file(tmp_path):
    path = Cell("tot-s1", "d2lpm+dlpm D=2", 1).path(tmp_path)
    assert path == tmp_path / "tot-s1.d2lpm+dlpm.D=2.1.jsonl"


def test_a_scheduler_is_a_placement_and_a_policy():
    assert parts("preble+lpm") == ("preble", "lpm")
    for wrong in ("preble", "lpm+preble", "preble+best"):
        with pytest.raises(ValueError, match="unknown scheduler"):
            parts(wrong)


def test_values_of_options_are_read_or_refused_in_one_line():
    assert comparison.names("a,b,,a") == ("a", "b")
    assert comparison.numbers("--quantum", "1, 2.5") == (1.0, 2.5)
    assert comparison.rates("tot-s1=0.5") == {"tot-s1": 0.5}
    for wrong in (
        lambda: comparison.numbers("--quantum", "many"),
        lambda: comparison.rates("tot-s1"),
        lambda: comparison.rates("tot-s1=1,tot-s1=2"),
        lambda: comparison.rates("tot-s1=many"),
        lambda: comparison.options_by_name("--policy-options", ["patience=64"]),
    ):
        with pytest.raises(ValueError, match=r"^--[^\n]+$"):
            wrong()
