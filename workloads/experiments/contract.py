"""What an experiment is: cells to run, what is kept of each run, and the report that is made of what was kept.

A *cell* is one scheduler on one traffic. It is run once for every seed, in a worker process, and each run
leaves a record: the JSON that `measure` returns. Reports are made of records alone, on any machine.

To write one, make a file in this folder and name its experiments in `__init__`:

    class Shares(Simulated):
        id, title = "x-fig1", "Two clients, one of them greedy"
        source = "X, Figure 1"
        about = "What runs, at which rates, and in what it is not the paper's setting."

        def cells(self, size):
            length_s = 600.0 if size == "full" else 60.0
            return [
                Cell(policy, Site(policy=policy), Traffic("greedy", {"rpm": 90}), Plan(length_s))
                for policy in ("vtc", "fcfs")
            ]

        def clients(self, cell, seed):                # in the worker; nothing but the arguments decides
            return [Client(...)]

        def measure(self, cell, run):                 # JSON of at most about 50 KB, curves thinned out
            return {"tokens_per_s": summarize(run).throughput_tokens_per_s, "curves": {...}}

        def report(self, results):                    # {"vtc": Result, "fcfs": Result}
            ratio = results["vtc"].median("tokens_per_s") / results["fcfs"].median("tokens_per_s")
            holds = verdict(ratio >= 0.95, partly=ratio >= 0.8)
            claim = Claim("VTC costs no throughput", "779 to 777", f"{ratio:.2f}×", holds, why="…")
            return Report(claims=[claim], tables=[...], figures=[...])

Quick cells are for a smoke test: fewer and shorter, with the same report. `why` is shown where a claim does
not hold; it says in plain words what is different here. Figures draw with `style`, so that a scheduler has
one colour on the whole page. A cell that is no simulation derives from `Experiment` and runs itself.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, cast

from workloads.clients import Client
from workloads.driver import Plan
from workloads.experiments.curves import Line
from workloads.records import Run
from workloads.simulation import Site, simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

Size: TypeAlias = Literal["quick", "full"]
SIZES: tuple[Size, ...] = ("quick", "full")

Json: TypeAlias = Any
"""None, bool, int, float, str, and lists and string-keyed dicts of such."""

CURVES = "curves"
"""What is measured under this name is kept of a cell's first seed alone: plots show one run, and records of
several runs would be large."""

_NAME = re.compile(r"[a-z0-9][a-z0-9+._-]*")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which clients there are: a name that `clients` knows, and its arguments as JSON."""

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of an experiment, but for its seed. `name` is the cell's own within the experiment."""

    name: str
    site: Site
    traffic: Traffic
    plan: Plan
    seeds: tuple[str, ...] = ("0",)
    """One run for each. Reports show medians, and the range where there are several."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a cell's name is a file's: small letters, digits and +._-, not {self.name!r}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"cell {self.name}: seeds must be there and differ: {self.seeds}")

    @property
    def simulated_s(self) -> float:
        """Seconds of arrivals on all replicas, which is about what a run's computing time is proportional to."""
        return self.plan.duration_s * self.site.replicas

    def to_json(self) -> dict[str, Json]:
        """Everything that decides a run of the cell but the seed."""
        told = asdict(self)
        del told["seeds"]
        return cast("dict[str, Json]", _plain(told))


@dataclass(frozen=True, slots=True)
class Measured:
    """What one run came to."""

    values: Mapping[str, Json]
    simulated_s: float
    """Virtual time from the first arrival to the run's end, times replicas."""


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one cell, in the order of its seeds."""

    cell: Cell
    runs: Sequence[Mapping[str, Json]]

    @property
    def first(self) -> Mapping[str, Json]:
        """What was measured with the first seed: where one run's curves are drawn, it is this one's."""
        return self.runs[0]

    def values(self, path: str) -> list[float]:
        """The number at `path`, keys joined by "/", of every run that has one; null is none."""
        found: list[float] = []
        for run in self.runs:
            at: Json = run
            for key in path.split("/"):
                at = at.get(key) if isinstance(at, Mapping) else None
            if at is not None:
                found.append(float(at))
        return found

    def median(self, path: str) -> float | None:
        """The median over seeds; None if no run has the number."""
        values = self.values(path)
        return median(values) if values else None

    def number(self, path: str) -> float:
        """The median of a number that every run has. Raises ValueError if one has not."""
        values = self.values(path)
        if not values or len(values) < len(self.runs):
            raise ValueError(f"cell {self.cell.name}: {len(values)} of {len(self.runs)} runs have {path}")
        return median(values)

    def curve(self, what: str, client: str) -> Line:
        """Of a client with the first seed, where the experiment keeps `what` of each over one row of times."""
        curves = self.first[CURVES]
        return curves["times_s"], curves[what][client]

    def shown(self, path: str, digits: int = 3) -> str:
        """The median for a table, with the range over seeds where there are several."""
        values = self.values(path)
        if len(values) < 2 or min(values) == max(values):
            return shown(self.median(path), digits)
        low, middle, high = (shown(value, digits) for value in (min(values), median(values), max(values)))
        return middle if low == high else f"{middle} ({low} to {high})"


Verdict: TypeAlias = Literal["yes", "partly", "no"]


def verdict(holds: bool, *, partly: bool = False) -> Verdict:
    """Of a claim: whether it holds, else whether a weaker form of it does."""
    return "yes" if holds else "partly" if partly else "no"


@dataclass(frozen=True, slots=True)
class Claim:
    """One sentence of a paper, its number beside ours."""

    text: str
    paper: str
    """Their number, with its unit."""
    ours: str
    holds: Verdict
    why: str = ""
    """Where it does not hold: what is different here, in plain words."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of words and numbers. Units stand in the columns' heads."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    digits: int = 3

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"table {self.title!r}: a row is not as wide as the head")


def medians(title: str, first: str, columns: Mapping[str, str], rows: Mapping[str, Result]) -> Table:
    """A table of medians over seeds, with the range where there are several. `first` heads the names of `rows`;
    `columns` are heads, with their units, and where their number is."""
    return Table(
        title,
        (first, *columns),
        [(name, *(result.shown(path) for path in columns.values())) for name, result in rows.items()],
    )


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot: `draw` gets an empty matplotlib figure of `inches` (width, height)."""

    name: str
    """Of its file, behind the experiment's id."""
    caption: str
    draw: "Callable[[Canvas], None]"
    inches: tuple[float, float] = (7.0, 3.6)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a figure's name is a file's: small letters, digits and +._-, not {self.name!r}"
            )


@dataclass(frozen=True, slots=True)
class Report:
    """What the page shows of an experiment."""

    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()


class Experiment(ABC):
    """One experiment. It holds no state: workers and reports each make their own."""

    id: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    """Paper and figures."""
    about: ClassVar[str]
    """What is run, and in what it is not the paper's setting."""
    version: ClassVar[int] = 1
    """Raised when what is measured changes: older records do not count any more."""

    @abstractmethod
    def cells(self, size: Size) -> Sequence[Cell]:
        """What to run. Quick is not larger than full."""

    @abstractmethod
    def run(self, cell: Cell, seed: str) -> Measured:
        """Carry out one cell, in a worker process. What it raises is shown as this cell's error."""

    @abstractmethod
    def report(self, results: Mapping[str, Result]) -> Report:
        """From the results of all cells of a size, by name. No clock, no files: records alone decide."""


class Simulated(Experiment):
    """An experiment whose cells are simulated: traffic in, one run out."""

    @abstractmethod
    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        """The cell's clients with that seed."""

    @abstractmethod
    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        """What is kept of a run."""

    def run(self, cell: Cell, seed: str) -> Measured:
        found = simulate(
            cell.site, self.clients(cell, seed), cell.plan, seed=seed, workload=cell.traffic.name
        )
        assert found.end is not None, "a simulation ends"
        return Measured(self.measure(cell, found), found.end.t_s * cell.site.replicas)


def shown(value: str | float | None, digits: int = 3) -> str:
    """A number for a table: a dash for None, `digits` significant digits, thousands apart."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def _plain(value: Json) -> Json:
    """With lists in place of tuples and dicts for all mappings, as JSON has them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
