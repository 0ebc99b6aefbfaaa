"""A comparison of schedulers: its case, its cells, the folder that keeps their records, and its result.

A scheduler is a placement at the router with a policy in the replicas, written PLACEMENT+POLICY. The *case* is the
options of the command. A *cell* is one scheduler on one workload with one seed; its record is a file of JSON lines, and
it is run if its file is missing or has no end, so the same command goes on where it was interrupted. Within a repeat
all schedulers see the same programs at the same times; repeats have different seeds. The arrival rate follows from a
capacity that is measured first: the well-behaved programs per second that the engine completes in a burst, whose start
and tail are part of the time, so that it is rather too low than too high.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from rich.console import Console

from router.placement import PLACEMENTS
from sglang_fair.bench import print_line
from sglang_fair.common.installed import missing_extra
from sglang_fair.common.pairs import split_pairs, typed
from sglang_fair.common.provenance import machine, versions
from sglang_fair.core import POLICIES
from sglang_fair.settings.commands import Option
from workloads.clients import SCENARIOS, Client, Scale
from workloads.measures import LINE, Summary, ratios, rows, summarize
from workloads.programs import Codec
from workloads.records import Cell, Run, read, replace_text
from workloads.report import comparison_table, figures, ratio_table
from workloads.session import Plan

OURS = "d2lpm+dlpm"

SCHEDULERS = (OURS, "round_robin+lpm", "preble+lpm", "client_round_robin+vtc")
"""Ours, and the baselines of DLPM §7."""

EACH_PLACEMENT = tuple(f"{placement}+dlpm" for placement in PLACEMENTS)
"""Every placement over the same fair replicas."""

LOADS: Mapping[str, float] = {"tot": 0.6, "judge": 0.8}
"""By kind of program: each client's rate as a part of its equal share of the measured capacity, counted in
well-behaved programs. So the well-behaved clients alone never overload the engine, and S1's bad client always does: its
trees cost about 11 times and its judgements about 3 times as much as theirs."""

BURST_RATE_PER_S = 1000.0
"""Arrival rate of the burst that measures capacity: all of its programs are there at once."""


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names, each once, in order."""
    return tuple(dict.fromkeys(name for name in text.split(",") if name))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Comma-separated numbers. Raises ValueError."""
    try:
        return tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ValueError(f"{option} takes numbers, separated by commas, not {text!r}") from None


def options_by_name(option: str, texts: list[str]) -> dict[str, str]:
    """The options of each policy or placement, from `NAME:KEY=VALUE,...`. Raises ValueError."""
    found: dict[str, str] = {}
    for text in texts:
        name, colon, values = text.partition(":")
        if not colon or not values:
            raise ValueError(f"{option} is NAME:KEY=VALUE,..., not {text!r}")
        found[name] = values
    return found


def rates(text: str) -> Mapping[str, float]:
    """Programs per second by workload, from `WORKLOAD=RATE,...`. Raises ValueError."""
    pairs = split_pairs(text, "--rates: rate")
    return {workload: typed(rate, float, f"--rates: {workload}") for workload, rate in pairs}


def parts(scheduler: str) -> tuple[str, str]:
    """Placement and policy of PLACEMENT+POLICY. Raises ValueError for unknown names."""
    placement, _, policy = scheduler.partition("+")
    if placement not in PLACEMENTS or policy not in POLICIES:
        raise ValueError(
            f"unknown scheduler {scheduler!r}: it is PLACEMENT+POLICY, of the placements {', '.join(PLACEMENTS)} "
            f"and the policies {', '.join(POLICIES)}"
        )
    return placement, policy


def burst(workload: str, scale: Scale, codec: Codec, *, seed: str = "calibration") -> tuple[Client, ...]:
    """The well-behaved clients of a scenario, with all of their programs at the very start."""
    clients = SCENARIOS[workload].clients(
        scale=scale, rate_per_s=BURST_RATE_PER_S, codec=codec, first_s=0.0, seed=seed
    )
    return tuple(client for client in clients if client.well_behaved)


def completed(run: Run) -> tuple[int, float]:
    """How many programs of a burst ended well, and when the last of them did, in seconds."""
    done = [p.t_done_s for p in run.programs if p.outcome == "ok" and p.t_done_s is not None]
    return len(done), max(done, default=0.0)


def rate_at(capacity: float, workload: str, scale: Scale, load: float | None = None) -> float:
    """Programs per second of each client, where all well-behaved ones together can have so many."""
    part = load or LOADS.get(SCENARIOS[workload].app, min(LOADS.values()))
    return float(f"{part * capacity / (scale.good_clients + 1):.3g}")


def summary_of(cell: Cell, run: Run) -> Summary:
    """Raises RuntimeError if no request was served."""
    found = summarize(run)
    if not found.ok:
        raise RuntimeError(f"{cell}: no request was served: {run.errors}")
    return found


Traffic, Runs = partial(Option, rich_help_panel="The traffic"), partial(Option, rich_help_panel="The runs")
Number = partial(Traffic, metavar="N")
Duration: TypeAlias = Annotated[float, Traffic(metavar="S", help="Seconds of arrivals in a run.")]
Drain: TypeAlias = Annotated[float, Traffic(metavar="S", help="Longest wait for the well-behaved clients.")]
LENGTHS = ("question_tokens", "thought_tokens", "article_tokens", "judgement_tokens")
NOT_OF_THE_CASE = ("json_file", "out", "resume", "jobs")


@dataclass(frozen=True, kw_only=True)
class Case:
    """The options of every comparison, which are its case. ValueError, in one line, for what makes no sense."""

    workloads: str | None = None
    schedulers: Annotated[
        str,
        Option(
            metavar="A+B,...",
            help=f"PLACEMENT+POLICY, comma separated, of {', '.join(PLACEMENTS)} and {', '.join(POLICIES)}.",
        ),
    ] = ",".join(SCHEDULERS)
    duration: Duration = 120.0
    drain: Drain = 60.0
    load: Annotated[
        float | None,
        Traffic(
            metavar="PART",
            help="Each client's rate, as a part of its equal share of the measured capacity. "
            f"[default: {', '.join(f'{app} {load:g}' for app, load in LOADS.items())}]",
            show_default=False,
        ),
    ] = None
    good_clients: Annotated[int, Number(help="Clients beside the one that misbehaves.")] = 3
    question_tokens: Annotated[int | None, Number(help="Tree of thoughts: length of a question.")] = None
    thought_tokens: Annotated[int | None, Number(help="Tree of thoughts: length of a thought.")] = None
    article_tokens: Annotated[int | None, Number(help="Judge: length of an article.")] = None
    judgement_tokens: Annotated[int | None, Number(help="Judge: length of a judgement.")] = None
    repeats: Annotated[int, Runs(metavar="N", help="Runs of each; medians are shown.")] = 2
    seed: Annotated[int, Runs(metavar="N", help="Of the programs and their arrivals.")] = 0
    json_file: Annotated[
        Path | None,
        Runs("--json", metavar="FILE", help="Write the last line to FILE too.", show_default=False),
    ] = None

    def __post_init__(self) -> None:
        known = self.known_workloads
        unknown = [name for name in self.workload_names if name not in known]
        if unknown or not self.workload_names:
            raise ValueError(f"unknown workload {', '.join(unknown) or 'none'}; there are {', '.join(known)}")
        if not self.scheduler_names:
            raise ValueError("no scheduler to compare")
        for name in self.scheduler_names:
            parts(name)
        scale = self.scale
        if scale.thought_tokens < 1 or scale.judgement_tokens < 1:
            raise ValueError("answers have at least 1 token")
        if self.repeats < 1 or self.duration <= 0 or self.drain < 0:
            raise ValueError("repeats and duration must be positive, the drain not negative")
        if (self.load is not None and self.load <= 0) or any(rate <= 0 for rate in self.rates_given.values()):
            raise ValueError("load and rates must be positive")

    @property
    def known_workloads(self) -> tuple[str, ...]:
        return tuple(SCENARIOS)

    @property
    def workload_names(self) -> tuple[str, ...]:
        return names(self.workloads or "")

    @property
    def scheduler_names(self) -> tuple[str, ...]:
        return names(self.schedulers)

    @property
    def rates_given(self) -> Mapping[str, float]:
        """Programs per second and client, by workload; measured where missing."""
        return {}

    @property
    def base_scale(self) -> Scale:
        return Scale()

    @property
    def scale(self) -> Scale:
        """Lengths that are not given are those of `base_scale`."""
        given = {name: value for name in LENGTHS if (value := getattr(self, name)) is not None}
        return replace(self.base_scale, good_clients=self.good_clients, **given)

    @property
    def plan(self) -> Plan:
        return Plan(self.duration, drain_s=self.drain, drain_for="well-behaved")

    def cell(self, workload: str, scheduler: str, repeat: int) -> Cell:
        return Cell(workload, scheduler, repeat, f"{self.seed}.{repeat}")

    def clients(self, cell: Cell, codec: Codec, rate_per_s: float, cv: float = 1.0) -> tuple[Client, ...]:
        """The clients of a scenario. All are active from the start, however short the run."""
        return SCENARIOS[cell.workload].clients(
            scale=self.scale, rate_per_s=rate_per_s, codec=codec, cv=cv, first_s=0.0, seed=cell.seed
        )

    def to_json(self) -> dict[str, Any]:
        """What decides the runs, as JSON reads it back."""
        found = {one.name: getattr(self, one.name) for one in fields(self)}
        kept = {name: value for name, value in found.items() if name not in NOT_OF_THE_CASE}
        return dict(json.loads(json.dumps(kept, default=str)))


class Comparison:
    """A case, the rates that are known so far, and the folder that keeps both beside the records."""

    def __init__(self, case: Case, folder: Path | None, console: Console) -> None:
        """Raises ValueError for a folder that holds another comparison."""
        self.case, self.folder, self.console = case, folder, console
        self.rates = dict(case.rates_given)
        if folder is not None and (folder / "case.json").exists():
            kept = json.loads((folder / "case.json").read_text(encoding="utf-8"))
            if kept["case"] != case.to_json():
                raise ValueError(f"{folder} holds a comparison with other options")
            self.rates = kept["rates_per_s"]
        self._save()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def measured(self, workload: str, capacity: float) -> None:
        """So many well-behaved programs a second are completed: the rate follows."""
        self.rates[workload] = rate = rate_at(capacity, workload, self.case.scale, self.case.load)
        self.say(f"{workload}: capacity {capacity:.3g}, each client {rate:.3g} programs/s")
        self._save()

    def path(self, cell: Cell) -> Path | None:
        return self.folder and cell.path(self.folder / "records")

    def recorded(self, cell: Cell) -> Run | None:
        """A run with its end."""
        path = self.path(cell)
        run = read(path) if path is not None and path.exists() else None
        return run if run is not None and run.end is not None else None

    def show(
        self, name: str, runs: Sequence[Run], summaries: Sequence[Summary], note: str = "", **more: Any
    ) -> None:
        """All schedulers, then ours over the best of the others, and the `note`. Plots of the `runs` and `summary.json`
        go to the folder, if there is one. Last of all is the line of JSON, which ends with `more`."""
        table = rows(summaries)
        self.console.print(comparison_table(table))
        schedulers = {row["scheduler"] for row in table}
        if OURS in schedulers and len(schedulers) > 1:
            self.console.print(ratio_table(table, OURS))
        if note:
            self.say(note)
        told = [{field: row[field] for field in LINE} for row in table]
        line = {"bench": name, "rows": told, "versions": versions(), "seed": self.case.seed, **more}
        if self.folder is not None:
            self._draw(runs, self.folder)
            found = {
                "comparison": line,
                "case": self.case.to_json(),
                "ratios": ratios(table, OURS),
                "machine": machine(),
                "runs": [asdict(summary) for summary in summaries],
            }
            replace_text(self.folder / "summary.json", json.dumps(found, indent=1, default=str) + "\n")
            self.say(f"records, plots and summary.json: {self.folder}")
        print_line(line, self.case.json_file)

    def _draw(self, runs: Sequence[Run], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            for figure in figures(runs):
                figure.save(folder / f"{figure.name}.png")
        except ImportError as error:
            self.say(f"no plots: {missing_extra('matplotlib') or error}")

    def _save(self) -> None:
        if self.folder is not None:
            kept = {"case": self.case.to_json(), "rates_per_s": self.rates}
            replace_text(self.folder / "case.json", json.dumps(kept, indent=1) + "\n")
