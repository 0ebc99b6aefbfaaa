"""Experiments: every one of the registry keeps the contract; the runner resumes and goes on; records make the page."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.support.budget import is_night
from tests.support.live import lives
from tests.support.odd_experiments import Odd
from tests.support.waiting import wait_until
from workloads import plots
from workloads.experiments import EXPERIMENTS, results, store, vtc_setting
from workloads.experiments.claims import Claim, Report, Table, at_least, at_most, graded
from workloads.experiments.command import chosen, main, on_page
from workloads.experiments.contract import SIZES, Cell, Experiment, Result, TrafficSpec
from workloads.experiments.dlpm_table2 import WORKLOADS, Table2
from workloads.experiments.senders import clients_of, even, on_off, poisson, single, traffic
from workloads.runs.pool import Failed
from workloads.session import Plan
from workloads.simulation import Fleet, Site

DOCS = Path(__file__).parents[2] / "docs"

ALL = pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=list(EXPERIMENTS))


# ---- the registry


@ALL
@pytest.mark.parametrize("size", SIZES)
def test_cells_are_unique_and_survive_json(experiment, size):
    cells = experiment.cells(size)
    assert cells
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert re.fullmatch(r"[a-z0-9][a-z0-9+._-]*", cell.name), "a part of a file's name"
        assert len(set(cell.seeds)) == len(cell.seeds) > 0
        told = json.loads(json.dumps(cell.to_json()))
        assert told == cell.to_json()
        fleet = told["site"]["fleet"]
        assert Site(**(told["site"] | {"fleet": fleet and Fleet(**fleet)})) == cell.site


def test_a_result_has_medians_and_ranges_over_seeds():
    result = Result(
        Cell("vtc", Site(), TrafficSpec("t"), Plan(1.0), ("0", "1", "2")),
        [{"a": {"b": 3.0}}, {"a": {"b": 1.0}}, {"a": {"b": None}}],
    )
    assert result.values("a/b") == [3.0, 1.0]
    assert result.median("a/b") == 2.0
    assert result.shown("a/b") == "2 (1 to 3)"
    assert result.median("a/c") is None
    for path, known in (("a/b", 2), ("a/c", 0)):
        with pytest.raises(ValueError, match=f"{known} of 3 runs have {path}"):
            result[path]


def test_a_curve_without_values_has_no_numbers():
    line = [0.0, 1.0, 2.0, 3.0], [None, 2.0, 4.0, None]
    assert plots.between(line) == [2.0, 4.0]
    assert (plots.average(line), plots.largest(line, 0.0, 1.0), plots.variation(line)) == (3.0, 2.0, 1 / 3)
    for number in (plots.average, plots.largest, plots.variation):
        with pytest.raises(ValueError, match="no value from 3 to 9"):
            number(line, 3.0, 9.0)
    with pytest.raises(ValueError, match="mean of a curve is 0"):
        plots.variation(([0.0], [0.0]))


def test_rates_that_nobody_has_are_not_equal():
    cell = Cell("vtc", Site(), TrafficSpec("t"), Plan(1.0))
    rates = {"a": [3.0, 1.0, None], "b": [1.0, 1.0, 1.0]}
    result = Result(cell, [{"curves": {"times_s": [60.0, 70.0, 80.0], "rate": rates}}])
    assert vtc_setting.largest_gap(result, "a", "b") == 1.0
    assert vtc_setting.largest_gap(result, "a", "b", since_s=61.0) == 0.0
    with pytest.raises(ValueError, match="no value"):
        vtc_setting.largest_gap(result, "a", "b", since_s=71.0)


# ---- reports


def test_a_report_has_its_parts_by_kind_whatever_their_order():
    parts = ["a\n   note", Table("t", "a |\n  b", [["x", 1.0]]), graded(True).claim("c | p | o")]
    report = Report([*parts, {"r": 2.0, "none": None}])
    assert (report.claims, report.notes) == ([Claim("c", "p", "o", "yes")], ["a\n   note"])
    assert report.tables[0].columns == ["a", "b"]
    assert report.ratios == {"r": 2.0, "none": None}
    with pytest.raises(ValueError, match="not as wide as the head"):
        Table("t", "a | b", [["x"]])


@pytest.mark.parametrize(("value", "verdict"), [(3.0, "yes"), (2.0, "partly"), (1.0, "no")])
def test_bands_decide_the_verdict(value, verdict):
    assert at_least(value, 3, 2) == verdict
    assert at_most(-value, -3, -2) == verdict
    found = graded(value >= 3, value >= 2).claim("c | | o | w")
    assert found == Claim("c", "our own question", "o", verdict, "w")


# ---- traffic


def test_senders_are_told_by_json_and_depend_on_the_seed_alone():
    told = traffic(
        "t",
        single("even", even(60), 8, 4),
        single("waiting", even(60, 5), 8, 4),
        single("on-off", on_off(60, 5, 5), 8, 4),
        single("poisson", poisson(60), 8, 4),
        single("ramp", {"kind": "ramp", "rpm": 6, "to_rpm": 120, "over_s": 20}, 8, 4),
        single("phases", {"kind": "phases", "phases": [[10, even(60)], [10, even(120)]]}, 8, 4),
    )
    times = {
        seed: {client.name: client.arrival_times(until_s=20) for client in clients_of(told, seed)}
        for seed in "01"
    }
    again = {client.name: client.arrival_times(until_s=20) for client in clients_of(told, "0")}
    assert times["0"] == again != times["1"]
    assert len(times["0"]["even"]) == 20
    assert sum(time_s < 0.001 for time_s in times["0"]["waiting"]) == 5
    assert len(times["0"]["waiting"]) == 25
    assert all(time_s % 10 < 5 for time_s in times["0"]["on-off"])
    assert sum(time_s < 10 for time_s in times["0"]["phases"]) == 10
    assert len(times["0"]["phases"]) == 30
    assert sum(time_s < 10 for time_s in times["0"]["ramp"]) < len(times["0"]["ramp"]) / 2
    with pytest.raises(ValueError, match="no arrivals 'never'"):
        clients_of(traffic("t", single("a", {"kind": "never"}, 1, 1)), "0")


def test_a_prompt_is_like_no_other():
    told = traffic("t", *(single(name, even(60), 16, 4) for name in "ab"))
    prompts = {
        next(client.program(index)).prompt
        for seed in "01"
        for client in clients_of(told, seed)
        for index in range(20)
    }
    assert len({prompt[:64] for prompt in prompts}) == 80
    assert {len(prompt) for prompt in prompts} == {64}


@pytest.mark.parametrize("name", ["qa", "tot", "judge"])
def test_programs_are_as_long_as_those_of_the_papers_table(name):
    paper = WORKLOADS[name]
    [cell] = [cell for cell in Table2().cells("full") if cell.name == name]
    found = Table2().run(cell, "0").values
    assert found["common_tokens"] == pytest.approx(paper.prefix_tokens, rel=0.05)
    assert found["output_tokens"] == pytest.approx(paper.output_tokens, rel=0.05)


# ---- the runner


def todo(folder, experiment):
    return [job for job in store.jobs_of([experiment], "full") if not job.is_made(folder)]


def make(folder, experiment):
    """Run what has no record; returns what failed."""
    ran = store.run(todo(folder, experiment), folder, "full")
    return [(job, outcome) for job, outcome in ran if isinstance(outcome, Failed)]


def test_a_second_run_makes_nothing_and_a_changed_cell_alone_is_made_again(tmp_path):
    first = Odd([("a", {"x": 1}), ("b", {"x": 2})], ("0", "1"))
    assert make(tmp_path, first) == []
    assert first.ran == [("a", "0"), ("a", "1"), ("b", "0"), ("b", "1")]
    second = Odd([("a", {"x": 1}), ("b", {"x": 3})], ("0", "1", "2"))
    make(tmp_path, second)
    assert second.ran == [("a", "2"), ("b", "0"), ("b", "1"), ("b", "2")]
    third = Odd([("a", {"x": 1}), ("b", {"x": 3})])
    make(tmp_path, third)
    assert third.ran == []
    assert store.read(tmp_path / "odd" / "b.0.json").measured["y"] == 6


@pytest.mark.parametrize("text", ["{", '{"cell": {}}'])
def test_a_record_that_cannot_be_read_is_made_again(tmp_path, text):
    make(tmp_path, Odd([("a", {"x": 1})]))
    (tmp_path / "odd" / "a.0.json").write_text(text)
    again = Odd([("a", {"x": 1})])
    make(tmp_path, again)
    assert again.ran == [("a", "0")]


def test_a_cell_that_fails_is_named_and_the_others_go_on(tmp_path):
    cells = [("a", {"fails": True}), ("b", {"x": 2})]
    [(job, failed)] = make(tmp_path, Odd(cells))
    assert (job.name, failed.error) == ("odd a", "RuntimeError: it is broken")
    assert [record.name for record in store.read_folder(tmp_path, ["odd"])] == ["b"]
    mended = Odd([("a", {"x": 1}), ("b", {"x": 2})])
    assert make(tmp_path, mended) == []
    assert mended.ran == [("a", "0")]
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_an_interruption_keeps_what_was_made(tmp_path):
    experiment = Odd([("a", {"x": 1}), ("b", {"x": 2})])
    ran = store.run(todo(tmp_path, experiment), tmp_path, "full")
    next(ran)
    ran.close()
    rest = Odd([("a", {"x": 1}), ("b", {"x": 2})])
    make(tmp_path, rest)
    assert rest.ran == [("b", "0")]


ABANDONS = """
from multiprocessing import active_children
from tests.support.odd_experiments import Odd
from workloads.experiments import store

if __name__ == "__main__":
    jobs = store.jobs_of([Odd([("long", {"sleeps": True})])], "quick")
    say = lambda _: print(*(child.pid for child in active_children()), flush=True)
    list(store.run(jobs, None, "quick", 1, say))
"""


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(tmp_path):
    """However that ends."""
    script = tmp_path / "abandons.py"
    script.write_text(ABANDONS)
    root = Path(__file__).parents[2]
    given = {"cwd": root, "env": {**os.environ, "PYTHONPATH": str(root)}, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script)], text=True, **given) as parent:
        said = parent.stdout.readline()
        parent.kill()
    [pid] = map(int, said.split())
    wait_until(lambda: not lives(pid), "the worker's end")


# ---- records and the page


CELLS = (("a", {"x": 1}), ("b", {"x": 2}))


def records_of(tmp_path, cells=CELLS, seeds=("0",)):
    make(tmp_path / "made", Odd(cells, seeds))
    return store.read_folder(tmp_path / "made", ["odd"])


def test_records_survive_publishing(tmp_path):
    records = records_of(tmp_path, seeds=("0", "1"))
    records = [replace(one, machine={"cores": 2}) for one in records]
    records[0] = replace(records[0], versions={"commit": "other"})
    store.publish(tmp_path / "docs", records)
    assert store.read_published(tmp_path / "docs") == records
    before = (tmp_path / "docs" / "odd.json").read_text()
    store.publish(tmp_path / "docs", list(reversed(records)))
    assert (tmp_path / "docs" / "odd.json").read_text() == before


def test_the_page_is_a_function_of_the_records_whatever_their_order(tmp_path):
    records = records_of(tmp_path, seeds=("0", "1"))
    shuffled = Random(1).sample(records, len(records))
    page = results.page(records, {"odd": Odd(CELLS, ("0", "1"))})
    assert results.page(shuffled, {"odd": Odd(CELLS, ("0", "1"))}) == page
    for part in ("2.5 (2 to 3)", "Nobody, Figure 0", "odd-y.png", "The sum is 6", "; Python "):
        assert part in page


def test_a_record_from_before_a_field_has_its_default(tmp_path):
    [record] = records_of(tmp_path, CELLS[:1])
    path = tmp_path / "made" / "odd" / "a.0.json"
    told = json.loads(path.read_text())
    del told["cell"]["site"]["throttle"]
    path.write_text(json.dumps(told))
    assert store.read(path) == record


def test_a_record_of_another_form_of_its_cell_is_not_reported(tmp_path):
    page = results.page(records_of(tmp_path), {"odd": Odd([("a", {"x": 1}), ("b", {"x": 5})])})
    assert "Not complete: without b." in page
    assert "The sum is 6" not in page


def test_a_report_that_fails_is_named_and_the_others_are_made(tmp_path):
    records = records_of(tmp_path)
    records += [replace(record, experiment="other", measured={"y": None}) for record in records]
    told = results.reports(records, {"odd": Odd(CELLS), "other": Odd(CELLS)})
    assert [(one.failed, one.lacks) for one in told] == [
        (False, ""),
        (True, "No report: ValueError: cell a: 0 of 1 runs have y."),
    ]
    page = results.page(records, {"odd": Odd(CELLS), "other": Odd(CELLS)})
    assert "No report: ValueError: cell a: 0 of 1 runs have y." in page
    assert "The sum is 6" in page


def test_quick_and_full_records_are_not_mixed(tmp_path):
    records = records_of(tmp_path)
    with pytest.raises(ValueError, match="quick and full"):
        results.page([records[0], replace(records[1], size="quick")], {"odd": Odd(CELLS)})


def test_numbers_are_kept_short_and_finite():
    kept = store.rounded(
        {"a": 1.23456789, "b": float("nan"), "c": [float("inf"), 3.0, 7], "d": True, "e": None}
    )
    assert kept == {"a": 1.2346, "b": None, "c": [None, 3, 7], "d": True, "e": None}
    json.dumps(kept, allow_nan=False)


@pytest.mark.slow
@pytest.mark.skipif(not (DOCS / "results.md").exists(), reason="no results are published")
def test_the_committed_page_is_what_the_committed_records_yield():
    records = store.read_published(DOCS / "results")
    assert results.page(records, on_page(EXPERIMENTS)) == (DOCS / "results.md").read_text(encoding="utf-8")
    for one in results.reports(records, on_page(EXPERIMENTS)):
        assert not one.lacks, one.experiment.id
        for found in one.report.claims:
            assert found.text
            assert found.paper, f"{found.text}: no number of the paper's"
            assert found.holds == "yes" or found.why, f"{found.text}: does not hold, and nobody says why"
        for figure in one.report.figures:
            assert (DOCS / "results" / results.figure_file(one.experiment.id, figure, "png")).exists()


# ---- the command


@pytest.mark.slow
def test_the_command_runs_shows_and_writes_the_page(tmp_path, capsys):
    odd = {"odd": Odd(CELLS)}
    page, out = tmp_path / "page.md", tmp_path / "out"
    given = ["all", "--jobs", "0", "--out", str(out), "--page", str(page)]
    assert main(given, experiments=odd) == 0
    assert page.read_text() == results.page(store.read_folder(out, odd), odd)
    assert (out / "plots" / "odd-y.svg").exists()
    assert main(given, experiments=odd) == 0
    assert len(odd["odd"].ran) == 2
    assert main([*given, "--again"], experiments=odd) == 0
    assert len(odd["odd"].ran) == 4
    assert "The sum is 6" in capsys.readouterr().out


def test_the_command_ends_with_1_after_a_failure(tmp_path, capsys):
    odd = {"odd": Odd([("a", {"x": 1}), ("b", {"fails": True})])}
    assert main(["odd", "--quick", "--jobs", "0", "--out", str(tmp_path)], experiments=odd) == 1
    assert "sglang-fair reproduce: odd b: RuntimeError: it is broken" in capsys.readouterr().err


class Broken(Odd):
    """Its report fails."""

    def report(self, at):
        raise KeyError("gone")


class Unexplained(Odd):
    """It claims what does not hold, and no words say why."""

    def report(self, at):
        yield graded(False).claim("All is well | yes | no")


@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [(Broken, 1, "odd: No report: KeyError: 'gone'"), (Unexplained, 0, "no words say why this does not")],
)
def test_what_is_not_explained_is_not_published(kind, status, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    odd = {kind.id: kind(CELLS)}
    assert main([kind.id, "--jobs", "0"], experiments=odd) == status
    assert main([kind.id, "--jobs", "0", "--publish"], experiments=odd) == 2
    assert says in capsys.readouterr().err
    assert not list((tmp_path / "docs").iterdir())


@pytest.mark.parametrize("given", [[], ["nothing"], ["all", "--publish", "--quick"], ["all", "--jobs", "-1"]])
def test_the_command_refuses_what_cannot_be_meant(given, capsys):
    assert main(given, experiments={"odd": Odd(CELLS)}) == 2
    assert capsys.readouterr().err.startswith("sglang-fair reproduce: ")


def test_experiments_are_chosen_by_pattern_in_the_registrys_order():
    assert list(chosen(["vtc-fig5", "vtc-fig4"], EXPERIMENTS)) == ["vtc-fig4", "vtc-fig5"]
    assert list(chosen(["all"], EXPERIMENTS)) == list(EXPERIMENTS)
    assert "vtc-trace" in chosen(["vtc-*"], EXPERIMENTS)


def some() -> dict[str, Experiment]:
    """At night all of them, on a push the shortest of each base class and each paper."""
    if is_night():
        return dict(EXPERIMENTS)
    found, seen = {}, set()
    length_s = {
        name: sum(cell.simulated_s for cell in one.cells("quick")) for name, one in EXPERIMENTS.items()
    }
    for name in sorted(length_s, key=length_s.__getitem__):
        kinds = {type(EXPERIMENTS[name]).__mro__[1], name.partition("-")[0]}
        if not kinds <= seen:
            found[name] = EXPERIMENTS[name]
            seen |= kinds
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_experiments_run_and_report(tmp_path):
    asked = some()
    assert main([*asked, "--quick", "--out", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    records = store.read_folder(tmp_path, asked)
    told = results.reports(records, asked)
    assert {one.experiment.id for one in told} == set(asked)
    for one in told:
        assert not one.lacks
        assert one.report.claims or one.report.tables
        assert all(claim.text and claim.paper and claim.ours for claim in one.report.claims)
    assert max(len(json.dumps(record.measured)) for record in records) < 60_000
