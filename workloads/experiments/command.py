"""`sglang-fair reproduce`: run the papers' experiments in the simulator, and write the page of results.

sglang-fair reproduce --list
sglang-fair reproduce vtc-fig3 'dlpm-*' --quick
sglang-fair reproduce all --publish
"""

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from sglang_fair.common.installed import missing_extra
from sglang_fair.common.provenance import cores
from sglang_fair.settings.commands import Argument, Option, command, run
from workloads.experiments import EXPERIMENTS, results, store
from workloads.experiments.claims import Verdict
from workloads.experiments.contract import Experiment, Size
from workloads.experiments.model_validation import Validation
from workloads.records import replace_text
from workloads.report import table_of
from workloads.runs.pool import Failed
from workloads.terminal import make_console, sigterm_as_ctrl_c

NAME = "sglang-fair reproduce"
DOCS = Path("docs")
PAGE, PUBLISHED = DOCS / "results.md", DOCS / "results"


def on_page(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """All experiments that the page shows: these, and the validation, which runs by itself."""
    return {**experiments, Validation.id: Validation()}


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions:
    ids: Annotated[
        list[str] | None,
        Argument(metavar="ID", help="Experiments, as --list names them; * stands for anything, all for all."),
    ] = None
    quick: Annotated[bool, Option("--quick", help="Smaller and shorter: a smoke test, not the results.")] = (
        False
    )
    jobs: Annotated[int, Option(min=0, metavar="N", help="Processes; 0 runs in this one.")] = cores()
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="Default: results/reproduce, with --quick results/reproduce-quick."),
    ] = None
    again: Annotated[bool, Option("--again", help="Run also what has a record.")] = False
    list: Annotated[
        bool, Option("--list", help="Name the experiments, what they show, and what they cost.")
    ] = False
    page: Annotated[
        Path | None, Option(metavar="FILE", help="Write the page of results from the records in --out.")
    ] = None
    publish: Annotated[
        bool,
        Option(
            "--publish", help=f"Write {PUBLISHED}/*.json and the plots there, and {PAGE} from these records."
        ),
    ] = False

    @property
    def folder(self) -> Path:
        """Where records are."""
        return self.out or Path("results") / ("reproduce-quick" if self.quick else "reproduce")

    @property
    def size(self) -> Size:
        return "quick" if self.quick else "full"

    def check(self) -> None:
        """Raises ValueError for what cannot be meant."""
        if not self.ids and not (self.page or self.publish):
            raise ValueError("name experiments, or all; --list names them")
        if self.publish and self.quick:
            raise ValueError("quick records are no results: --publish goes without --quick")
        if self.publish and not DOCS.is_dir():
            raise ValueError(
                f"--publish writes to {DOCS}/, which is not here: run it from the project's root"
            )


def main(argv: Sequence[str] | None = None, *, experiments: Mapping[str, Experiment] = EXPERIMENTS) -> int:
    """The command. Status 0 when all cells have records and make a report, 1 when one failed, 2 for bad input, 130
    after Ctrl-C."""

    def reproduce(given: ReproduceOptions) -> int:
        """Run the papers' experiments in the simulator. What has a record already is kept."""
        with sigterm_as_ctrl_c():
            return _reproduce(given, experiments)

    epilog = "Records, and plots as PNG and SVG, go to --out; a run that was interrupted goes on from there."
    return run(command(ReproduceOptions, reproduce), NAME, argv, epilog=epilog)


def _reproduce(given: ReproduceOptions, experiments: Mapping[str, Experiment]) -> int:
    console = make_console()
    if given.list:
        console.print(listing(chosen(given.ids or ["all"], experiments), given.folder, given.size))
        return 0
    given.check()
    asked = chosen(given.ids or (), experiments)
    try:
        errors = _make_records(asked, given, console)
    except KeyboardInterrupt:
        print(f"{NAME}: interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 130
    shown = asked or experiments
    reported = results.reports(store.read_folder(given.folder, shown), shown)
    for one in reported:
        if not one.lacks:
            console.print(claims_table(one))
    _draw(reported, given.folder / "plots", ("png", "svg"), console)
    if given.page:
        known = on_page(experiments)
        replace_text(given.page, results.page(store.read_folder(given.folder, known), known))
        console.print(f"wrote {given.page}")
    if given.publish:
        _publish(reported, experiments, console)
    print(json.dumps({"reproduce": {one.experiment.id: _verdicts(one) for one in reported}}))
    errors += [f"{one.experiment.id}: {one.lacks}" for one in reported if one.failed]
    for text in errors:
        print(f"{NAME}: {text}", file=sys.stderr)
    return 1 if errors else 0


def chosen(patterns: Sequence[str], experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """The experiments that match a pattern, in the registry's order. Raises ValueError for one that matches none."""
    for pattern in patterns:
        if pattern != "all" and not any(fnmatchcase(name, pattern) for name in experiments):
            raise ValueError(f"no experiment {pattern!r}: --list names them")
    return {
        name: experiment
        for name, experiment in experiments.items()
        if any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns)
    }


def listing(experiments: Mapping[str, Experiment], folder: Path, size: Size) -> Table:
    """Every experiment: its source, how much there is to simulate, and how long that took last time."""
    title = f"experiments ({size}); records in {folder}"
    view = table_of(title, "id|source|shows", "runs|with a record|simulated replica h|took s")
    for name, experiment in experiments.items():
        jobs = store.jobs_of([experiment], size)
        there = sum(job.is_made(folder) for job in jobs)
        took_s = sum(record.wall_s for record in store.read_folder(folder, [name]))
        simulated_h = sum(job.cell.simulated_s for job in jobs) / 3600
        numbers = str(len(jobs)), str(there), f"{simulated_h:.1f}", f"{took_s:.0f}" if there else "–"
        view.add_row(name, experiment.source, experiment.title, *numbers)
    return view


def _verdicts(one: results.Reported) -> Mapping[str, object]:
    """How many claims hold, and the numbers to compare; nothing of an experiment that is not complete."""
    if one.lacks:
        return {}
    held = [claim.holds for claim in one.report.claims]
    return {
        **{verdict: held.count(verdict) for verdict in Verdict},
        "ratios": store.rounded(one.report.ratios),
    }


def _make_records(
    experiments: Mapping[str, Experiment], given: ReproduceOptions, console: Console
) -> list[str]:
    """Run the cells that have no record yet. Returns what failed."""
    jobs = store.jobs_of(experiments.values(), given.size)
    todo = [job for job in jobs if given.again or not job.is_made(given.folder)]
    if len(todo) < len(jobs):
        console.print(f"{len(jobs) - len(todo)} of {len(jobs)} runs have a record in {given.folder}")
    columns = TextColumn("{task.completed:.0f} of {task.total:.0f} s"), BarColumn(), TimeRemainingColumn()
    errors = []
    with (
        closing(store.run(todo, given.folder, given.size, given.jobs)) as outcomes,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        bar_id = bar.add_task("", total=sum(job.cell.simulated_s for job in todo))
        for number, (job, outcome) in enumerate(outcomes, 1):
            bar.advance(bar_id, job.cell.simulated_s)
            if isinstance(outcome, Failed):
                errors.append(f"{job.name}: {outcome.error}")
                what = f"{outcome.error}\n{outcome.trace}".rstrip()
            else:
                what = f"{outcome.wall_s:.1f} s"
            console.print(f"[{number}/{len(todo)}] {job.name}: {what}", markup=False)
    return errors


def _publish(
    reported: Sequence[results.Reported], experiments: Mapping[str, Experiment], console: Console
) -> None:
    """Write the records into the documentation, then plots and the page from all records there. Raises ValueError,
    before anything is written, where there is no report, or a claim does not hold and no words say why."""
    for one in reported:
        if one.lacks:
            raise ValueError(f"{one.experiment.id}: {one.lacks} Nothing is published")
        for claim in one.report.claims:
            if claim.holds != "yes" and not claim.why:
                raise ValueError(f"{one.experiment.id}: no words say why this does not hold: {claim.text}")
    for one in reported:
        store.publish(PUBLISHED, one.records)
    records, known = store.read_published(PUBLISHED), on_page(experiments)
    _draw(results.reports(records, known), PUBLISHED, ("png",), console)
    replace_text(PAGE, results.page(records, known))
    console.print(f"wrote {PAGE} and {PUBLISHED}/ of {len(reported)} experiments")


def claims_table(one: results.Reported) -> Table:
    """An experiment's claims for the terminal."""
    view = table_of(one.title, "claim|paper|here", "holds")
    for claim in one.report.claims:
        view.add_row(claim.text, claim.paper, claim.ours, claim.holds)
    return view


def _draw(
    reported: Sequence[results.Reported], folder: Path, suffixes: Sequence[str], console: Console
) -> None:
    try:
        written = results.draw(reported, folder, suffixes)
    except ImportError as error:
        console.print(f"no plots: {missing_extra('matplotlib') or error}", markup=False)
    else:
        if written:
            console.print(f"{len(written)} plots in {folder}")


if __name__ == "__main__":
    raise SystemExit(main())
