"""The validation's arithmetic and report; its engines are started by hand alone."""

import json
from dataclasses import replace

import pytest
from matplotlib.figure import Figure as MatplotlibFigure

from sglang_fair.sim.cost_model import Fitted, Scaled, to_json
from workloads.clients import SCENARIOS, SMALL
from workloads.experiments.claims import Report
from workloads.experiments.contract import Result
from workloads.experiments.model_validation import BENCH, Validation, compared, curves, deviation, numbers
from workloads.programs import PackedCodec
from workloads.session import Plan
from workloads.simulation import simulate

MODEL = Fitted(0.009, 3e-5, 2e-8, 2e-4, 0.005, 8e-5, 6e-7, 5e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same traffic on a model, and on one half as fast."""
    folder, found = tmp_path_factory.mktemp("models"), {}
    for name, factor in (("real", 1.0), ("simulated", 2.0)):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(to_json(Scaled(MODEL, factor))))
        clients = SCENARIOS["judge-s1"].clients(scale=SMALL, rate_per_s=0.9, codec=PackedCodec(), first_s=0.0)
        plan = Plan(duration_s=6.0, drain_s=2.0)
        found[name] = simulate(replace(BENCH, cost_model=str(path)), clients, plan)
    return found


@pytest.fixture(scope="module")
def told(runs):
    return {name: {"numbers": numbers(run), "curves": curves(run)} for name, run in runs.items()}


def test_a_run_does_not_deviate_from_itself(told):
    assert set(deviation([told["real"]], told["real"]).values()) == {0.0}


def test_a_slower_engine_gives_less(told):
    found = deviation([told["real"]], told["simulated"])
    assert -0.6 < found["throughput"] < -0.2
    assert 0.1 < found["service"] < 0.6
    assert found["p50_s"] > 0.2
    assert abs(found["hit_rate"]) < 0.2


def test_what_an_engine_does_not_tell_is_no_agreement(runs, told):
    nothing = {"numbers": dict.fromkeys(told["real"]["numbers"]), "curves": {"a": [0.0], "b": [0.0]}}
    assert set(deviation([nothing], nothing).values()) == {None}
    record = {"calibration": None, "workloads": {"judge-s1": compared(("real", "simulated"), runs)}}
    record["workloads"]["judge-s1"]["simulated"]["deviation"]["hit_rate"] = None
    with pytest.raises(ValueError, match="1 of 1 deviations of hit_rate are not known"):
        Report(Validation().report({"bench": Result(Validation().cells("quick")[0], [record])}))


def test_the_report_names_the_worst(runs, told):
    cell = Validation().cells("quick")[0]
    names = ("real", "simulated")
    record = {
        "calibration": {"fit": {"all": {"median": 0.05, "p90": 0.2}}, "scheduling_s": 0.001},
        "workloads": {"judge-s1": compared(names, runs)},
    }
    report = Report(Validation().report({"bench": Result(cell, [json.loads(json.dumps(record))])}))
    [claim], [table], [figure] = report.claims, report.tables, report.figures
    worst = deviation([told["real"]], told["simulated"])
    assert claim.holds == "no"
    assert f"{worst['service']:.0%}" in claim.ours
    assert [row[2] for row in table.rows] == ["real", "simulated"]
    assert figure.name == "bench-judge-s1"
    canvas = MatplotlibFigure()
    figure.draw(canvas)
    assert [len(axes.lines) for axes in canvas.axes] == [4, 4]
