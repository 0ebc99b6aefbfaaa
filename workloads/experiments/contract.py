"""What an experiment is: cells to run, what is kept of each run, and what is claimed of it.

A *cell* is one scheduler on one traffic. Each of its seeds is one run, carried out in a worker process, and leaves one
record: the JSON that `measure` returns. Reports are made from records alone, on any machine.

    class Shares(Simulated):
        id = "x-fig1"
        title = "Two clients, one of them greedy"
        source = "X, Figure 1"
        about = f"{RPM} requests/min of one, twice as many of the other."
        lengths_s = (600.0, 60.0)           # of a full run and of a quick one, which is a smoke test

        def rows(self, full, length_s):     # traffic is JSON: a cell's specification is part of its records
            sent = traffic("greedy", single("client 1", even(RPM), 256, 256), ...)
            for policy, label in (("vtc", "VTC"), ("fcfs", "FCFS")):
                yield Row(policy, Site(policy=policy), sent, label)

        def measure(self, cell, run):       # JSON of at most about 50 KB; thin out curves
            return {"tokens_per_s": summarize(run).throughput_tokens_per_s}

        def report(self, at):               # `at["vtc"]["tokens_per_s"]` is the median over seeds
            ratio = at["vtc"]["tokens_per_s"] / at["fcfs"]["tokens_per_s"]
            yield at_least(ratio, 0.98, 0.9).claim(f"VTC costs no throughput | 779 tokens/s | {ratio:.2f}× FCFS's")
            yield medians("Medians", "scheduler | tokens/s = tokens_per_s", at.values())

Traffic of another kind than senders' needs its own `clients`, a cell that is no simulation its own `run`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from workloads.clients import Client
from workloads.experiments.claims import Entry, Part, Table, plain, shown
from workloads.experiments.senders import Json as Json
from workloads.experiments.senders import TrafficSpec as TrafficSpec
from workloads.experiments.senders import clients_of
from workloads.plots import Line
from workloads.records import Run
from workloads.session import Plan
from workloads.simulation import Site, simulate

Size: TypeAlias = Literal["quick", "full"]
SIZES: tuple[Size, ...] = ("quick", "full")

SEEDS = ("0", "1", "2")
"""Seeds of a full run, where one is not enough."""

CURVES = "curves"
"""The key of `measure` that is kept for a cell's first seed only: plots show one run, and records stay small."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One scheduler on one traffic. `name` is unique within the experiment and is part of a file name."""

    name: str
    site: Site
    traffic: TrafficSpec
    plan: Plan
    seeds: tuple[str, ...] = ("0",)
    """One run for each. Reports show medians, and the range where there are several."""
    label: str = ""
    """What tables and legends call it, where that is not its name."""

    @property
    def title(self) -> str:
        """Its label, or else its name."""
        return self.label or self.name

    @property
    def simulated_s(self) -> float:
        """Seconds of arrivals, summed over replicas: a run's computing time is about proportional to it."""
        return self.plan.duration_s * self.site.replicas

    def to_json(self) -> dict[str, Json]:
        """Everything that decides the outcome of a run except its seed."""
        found = _json(self)
        del found["seeds"], found["label"]
        return found


def filled(cell: Mapping[str, Json]) -> dict[str, Json]:
    """A recorded cell with the fields of today's site and plan; one that is younger than the record has its default."""
    site = _json(Site())
    known = {name: value for name, value in cell["site"].items() if name in site}
    return {**cell, "site": site | known, "plan": _json(Plan(1.0)) | cell["plan"]}


def _json(one: "Cell | Site | Plan") -> dict[str, Json]:
    """As JSON reads it back, with lists in place of tuples."""
    return dict(json.loads(json.dumps(asdict(one))))


class Scheduler(NamedTuple):
    """What tables call it, and the fields of a site that are its own."""

    label: str
    fields: Mapping[str, Json]


class Row(NamedTuple):
    """A cell as its experiment tells it; the plan and the seeds are the experiment's where it has none of its own."""

    name: str
    site: Site
    traffic: TrafficSpec
    label: str = ""
    plan: Plan | None = None
    seeds: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run yielded."""

    values: Mapping[str, Json]
    simulated_s: float
    """Virtual time from the first arrival to the end of the run, times replicas."""


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one cell, in the order of its seeds."""

    cell: Cell
    runs: Sequence[Mapping[str, Json]]

    @property
    def first(self) -> Mapping[str, Json]:
        """The run with the first seed, which is the one whose curves are kept."""
        return self.runs[0]

    def values(self, path: str) -> list[float]:
        """The number at `path`, keys joined by "/", in every run that has one; null counts as none."""
        found: list[float] = []
        for run in self.runs:
            value: Json = run
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, Mapping) else None
            found += [] if value is None else [float(value)]
        return found

    def median(self, path: str) -> float | None:
        """None if no run has the number."""
        return median(values) if (values := self.values(path)) else None

    def __getitem__(self, path: str) -> float:
        """The median over seeds. Raises ValueError if a run lacks the number."""
        values = self.values(path)
        if not values or len(values) < len(self.runs):
            raise ValueError(f"cell {self.cell.name}: {len(values)} of {len(self.runs)} runs have {path}")
        return median(values)

    def curves(self, what: str) -> dict[str, Line]:
        """The clients' curves with the first seed, where the experiment keeps `what` of each over common times."""
        curves = self.first[CURVES]
        return {client: (curves["times_s"], values) for client, values in curves[what].items()}

    def curve(self, what: str, client: str) -> Line:
        return self.curves(what)[client]

    def shown(self, path: str, digits: int = 3) -> str:
        """The median for a table, with the range over seeds where there are several."""
        values = self.values(path)
        if len(values) < 2 or min(values) == max(values):
            return shown(self.median(path), digits)
        low, middle, high = (shown(value, digits) for value in (min(values), median(values), max(values)))
        return middle if low == high else f"{middle} ({low} to {high})"


def medians(
    title: str, columns: str, results: Iterable[Result], digits: int = 3, **own: Mapping[str, Entry]
) -> Table:
    """A row for each result. A column is its name, "=", and where its number is: the name of some of `own`, which are
    by cell, or a path of which the median is shown. One without "=" has what the cell is called."""

    def entry(one: Result, where: str) -> Entry:
        if where in own:
            return own[where][one.cell.name]
        return one.shown(where, digits) if where else one.cell.title

    parts = [column.partition(" = ") for column in plain(columns).split(" | ")]
    rows = [[entry(one, where) for *_, where in parts] for one in results]
    return Table(title, " | ".join(name for name, *_ in parts), rows, digits)


class Experiment(ABC):
    """One experiment. It has no state: workers and reports each make their own."""

    id: ClassVar[str]
    bounds_steps: ClassVar[bool] = True
    """Whether replicas have the stall bound of their cell's site. False: they compute prompts first, whatever it is."""

    title: ClassVar[str]
    source: ClassVar[str]
    """Paper and figures."""
    about: ClassVar[str]
    """What is run, and how it differs from the paper's setting."""
    lengths_s: ClassVar[tuple[float, float]] = (0.0, 0.0)
    """Of a full run and of a quick one."""
    seeds: ClassVar[tuple[str, ...]] = SEEDS
    """Of a full run."""

    @abstractmethod
    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        """What to run, a row for each cell. Quick takes no longer than full."""

    def plan(self, length_s: float) -> Plan:
        """Of a run whose arrivals last so long."""
        return Plan(length_s)

    def cells(self, size: Size) -> Sequence[Cell]:
        """What to run."""
        full = size == "full"
        length_s, seeds = (self.lengths_s[0], self.seeds) if full else (self.lengths_s[1], SEEDS[:1])
        return [
            Cell(name, site, sent, plan or self.plan(length_s), own or seeds, label)
            for name, site, sent, label, plan, own in self.rows(full, length_s)
        ]

    @abstractmethod
    def run(self, cell: Cell, seed: str) -> Measured:
        """Carry out one cell, in a worker process. An exception is shown as this cell's error."""

    @abstractmethod
    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        """Claims, tables, figures, notes and ratios. Derived from the records alone: the same records give the same."""


class Simulated(Experiment):
    """An experiment whose cells are simulated: traffic in, one run out."""

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        """The cell's clients with that seed: its senders."""
        return clients_of(cell.traffic, seed)

    @abstractmethod
    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        """What is kept of a run."""

    def run(self, cell: Cell, seed: str) -> Measured:
        found = simulate(
            cell.site, self.clients(cell, seed), cell.plan, seed=seed, workload=cell.traffic.name
        )
        assert found.end is not None, "a simulation ends"
        return Measured(self.measure(cell, found), found.end.t_s * cell.site.replicas)
