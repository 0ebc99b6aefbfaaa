"""`sglang-fair reproduce`: run the papers' experiments in the simulator, and write the page of results.

sglang-fair reproduce --list
sglang-fair reproduce vtc-fig3 'dlpm-*' --quick
sglang-fair reproduce all --publish
"""

import argparse
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sglang_fair.common.provenance import cores, machine, versions
from workloads.experiments import EXPERIMENTS, results, runner, store
from workloads.experiments.contract import Experiment, Measured, Size
from workloads.experiments.model_validation import Validation
from workloads.experiments.runner import CarryOut, Failed, Job, Made, Watch
from workloads.experiments.words import heading
from workloads.terminal import FILE_COLUMNS, interrupted

DOCS = Path("docs")
PAGE, PUBLISHED = DOCS / "results.md", DOCS / "results"


def on_page(experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Those and, if it has records, how far the models are from what they model: that one is run by itself."""
    return {**experiments, Validation.id: Validation()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="sglang-fair reproduce",
        description="Run the papers' experiments in the simulator. What has a record already is kept.",
        epilog="Records, and plots as PNG and SVG, go to --out; a run that was interrupted goes on from there.",
    )
    say = parser.add_argument
    say(
        "ids",
        nargs="*",
        metavar="ID",
        help="experiments, as --list names them; * stands for anything, all for all",
    )
    say("--quick", action="store_true", help="smaller and shorter: a smoke test, not the results")
    say("--jobs", type=int, default=cores(), metavar="N", help="processes (default: one a core)")
    say(
        "--out",
        type=Path,
        metavar="DIR",
        help="default: results/reproduce, with --quick results/reproduce-quick",
    )
    say("--again", action="store_true", help="run also what has a record")
    say("--list", action="store_true", help="name the experiments, what they show, and what they cost")
    say("--page", type=Path, metavar="FILE", help="write the page of results from the records in --out")
    say(
        "--publish",
        action="store_true",
        help=f"write {PUBLISHED}/*.json and the plots there, and {PAGE} from these records",
    )
    return parser.parse_args(argv)


def chosen(patterns: Sequence[str], experiments: Mapping[str, Experiment]) -> dict[str, Experiment]:
    """Those that the patterns name, in the registry's order. Raises ValueError for one that names none."""
    for pattern in patterns:
        if pattern != "all" and not any(fnmatchcase(name, pattern) for name in experiments):
            raise ValueError(f"no experiment {pattern!r}: --list names them")
    return {
        name: experiment
        for name, experiment in experiments.items()
        if any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns)
    }


def main(
    argv: Sequence[str] | None = None,
    *,
    experiments: Mapping[str, Experiment] = EXPERIMENTS,
    carry_out: CarryOut | None = None,
) -> int:
    """The command. Status 0 when all cells have records and make a report, 1 when one failed, 2 for bad input, 130
    after Ctrl-C."""
    given = parse(argv)
    console = Console(width=None if sys.stdout.isatty() else FILE_COLUMNS, highlight=False)
    size: Size = "quick" if given.quick else "full"
    folder = given.out or Path("results") / ("reproduce-quick" if given.quick else "reproduce")
    previous = signal.signal(signal.SIGTERM, interrupted)
    try:
        if given.list:
            console.print(listing(chosen(given.ids or ["all"], experiments), folder, size))
            return 0
        _check(given)
        mine = chosen(given.ids, experiments)
        how = carry_out or (runner.in_processes(given.jobs) if given.jobs else runner.here(experiments))
        failed = _run(mine, size, folder, how, again=given.again, console=console)
        told = _present(mine, size, folder, given, console, experiments)
    except (OSError, ValueError) as error:
        print(f"reproduce: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reproduce: interrupted; the same command goes on with what is missing", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, previous)
    for job, what in failed:
        print(f"reproduce: {job.name}: {what.error}", file=sys.stderr)
    unreported = [one for one in told if one.error]
    for one in unreported:
        print(f"reproduce: {one.experiment.id}: {one.lacks}", file=sys.stderr)
    return 1 if failed or unreported else 0


def listing(experiments: Mapping[str, Experiment], folder: Path, size: Size) -> Table:
    """Every experiment: where it is from, how much there is to simulate, and how long that took last time."""
    view = Table(title=f"experiments ({size}); records in {folder}", title_justify="left")
    for column in ("id", "source", "shows"):
        view.add_column(column)
    for column in ("runs", "with a record", "simulated replica h", "took s"):
        view.add_column(column, justify="right")
    for name, experiment in experiments.items():
        jobs = runner.jobs_of({name: experiment}, size)
        there = len(jobs) - len(runner.missing(jobs, folder))
        took_s = sum(record.wall_s for record in store.read_folder(folder, [name]))
        simulated_h = sum(job.cell.simulated_s for job in jobs) / 3600
        view.add_row(
            name,
            heading(experiment).source,
            heading(experiment).title,
            str(len(jobs)),
            str(there),
            f"{simulated_h:.1f}",
            f"{took_s:.0f}" if there else "–",
        )
    return view


def _check(given: argparse.Namespace) -> None:
    """Raises ValueError for what cannot be meant."""
    if not given.ids and not (given.page or given.publish):
        raise ValueError("name experiments, or all; --list names them")
    if given.jobs < 0:
        raise ValueError("--jobs must be at least 1, or 0 to run in this process")
    if given.publish and given.quick:
        raise ValueError("quick records are no results: --publish goes without --quick")
    if given.publish and not DOCS.is_dir():
        raise ValueError(f"--publish writes to {DOCS}/, which is not here: run it from the project's root")


def _run(
    experiments: Mapping[str, Experiment],
    size: Size,
    folder: Path,
    carry_out: CarryOut,
    *,
    again: bool,
    console: Console,
) -> list[tuple[Job, Failed]]:
    """Make the records that are missing."""
    jobs = runner.jobs_of(experiments, size)
    todo = jobs if again else runner.missing(jobs, folder)
    if len(todo) < len(jobs):
        console.print(f"{len(jobs) - len(todo)} of {len(jobs)} runs have a record in {folder}")
    if not todo:
        return []
    with _Shown(todo, console) as view:
        return runner.run(
            todo,
            folder=folder,
            size=size,
            carry_out=carry_out,
            versions=versions(),
            machine=machine(),
            watch=Watch(view.began, view.ended),
        )


def _present(
    mine: Mapping[str, Experiment],
    size: Size,
    folder: Path,
    given: argparse.Namespace,
    console: Console,
    experiments: Mapping[str, Experiment],
) -> list[results.Reported]:
    """Claims on the console, plots beside the records; the page and what is published, where asked for. Returns
    what was reported."""
    told = results.reports(store.read_folder(folder, mine or experiments), mine or experiments)
    for one in told:
        if one.report is not None:
            console.print(claims_table(one))
    _draw(told, folder / "plots", ("png", "svg"), console)
    if given.page:
        known = on_page(experiments)
        text = results.page(store.read_folder(folder, known), known)
        store.replace_text(given.page, text)
        console.print(f"wrote {given.page}")
    if given.publish:
        publish(told, experiments, console)
    return told


def publish(
    told: Sequence[results.Reported], experiments: Mapping[str, Experiment], console: Console
) -> None:
    """Records of `told` into the documentation, and plots and the page from all records there. Raises ValueError,
    before anything is written, where there is no report, or a claim fails and nobody says why."""
    for one in told:
        if one.report is None:
            raise ValueError(f"{one.experiment.id}: {one.lacks} Nothing is published")
        for claim in one.report.claims:
            if claim.holds != "yes" and not claim.why:
                raise ValueError(f"{one.experiment.id}: nobody says why this does not hold: {claim.text}")
    for one in told:
        store.publish(PUBLISHED, one.records)
    records, known = store.read_published(PUBLISHED), on_page(experiments)
    _draw(results.reports(records, known), PUBLISHED, ("png",), console)
    store.replace_text(PAGE, results.page(records, known))
    console.print(f"wrote {PAGE} and {PUBLISHED}/ of {len(told)} experiments")


def claims_table(one: results.Reported) -> Table:
    """What an experiment claims, as people read it."""
    assert one.report is not None
    view = Table(title=f"{one.experiment.id}: {one.heading.title}", title_justify="left")
    for column in ("claim", "paper", "here", "holds"):
        view.add_column(column)
    for claim in one.report.claims:
        view.add_row(claim.text, claim.paper, claim.ours, claim.holds)
    return view


def _draw(told: Sequence[results.Reported], folder: Path, suffixes: Sequence[str], console: Console) -> None:
    try:
        written = results.draw(told, folder, suffixes)
    except ImportError as error:
        console.print(f"no plots: {error}")
    else:
        if written:
            console.print(f"{len(written)} plots in {folder}")


class _Shown:
    """How far the runs are: on a terminal a bar with the cells under way, elsewhere a line for each that ended."""

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self._console, self._total, self._done = console, len(jobs), 0
        self._began_s = time.monotonic()
        self._running: dict[str, float] = {}
        self._work, self._worked = sum(job.cell.simulated_s for job in jobs), 0.0
        self._bar = Progress(
            TextColumn("{task.completed:.0%}"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
        )
        self._task = self._bar.add_task("", total=1.0)
        self._live = Live(console=console, transient=True, get_renderable=self._render, refresh_per_second=2)

    def __enter__(self) -> "_Shown":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def began(self, job: Job) -> None:
        self._running[job.name] = time.monotonic()

    def ended(self, job: Job, outcome: Made[Measured] | Failed) -> None:
        del self._running[job.name]
        self._done += 1
        self._worked += job.cell.simulated_s
        self._bar.update(self._task, completed=self._worked / self._work if self._work else 1.0)
        what = outcome.error if isinstance(outcome, Failed) else f"{outcome.wall_s:.1f} s"
        self._console.print(f"[{self._done}/{self._total}] {job.name}: {what}", markup=False)
        if isinstance(outcome, Failed) and outcome.trace:
            self._console.print(outcome.trace.rstrip(), markup=False)

    def _render(self) -> Group:
        now_s = time.monotonic()
        left = self._work - self._worked
        eta = f", about {(now_s - self._began_s) * left / self._worked:.0f} s to go" if self._worked else ""
        self._bar.update(self._task, description=f"{self._done} of {self._total} runs{eta}")
        under_way = (f"  {name}, {now_s - since_s:.0f} s" for name, since_s in self._running.items())
        return Group(self._bar, *(Text(line) for line in under_way))
