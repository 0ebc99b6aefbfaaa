"""From records to the page of results and its plots. Nothing here runs or measures.

An experiment is reported when all cells of its records' size are there. Until then the page says what is missing, and
if a report fails, why. Records of cells that the experiment no longer has, or has changed, are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from sglang_fair.core import POLICIES
from sglang_fair.settings.table import Cluster
from workloads.experiments.claims import Entry, Report, plain, shown
from workloads.experiments.contract import Cell, Experiment, Result
from workloads.experiments.store import Record
from workloads.plots import Figure

DPI = 110

INTRODUCTION = """\
# Results

The papers' experiments, repeated with the policies, placements and router of the running system, over modelled GPUs in
virtual time. This page is generated from the records in `docs/results/` and from nothing else:
`sglang-fair reproduce all --publish` runs every experiment and writes both, `sglang-fair reproduce ID` runs one, and
`--list` names them. The numbers do not depend on the machine that ran them, with two exceptions: `dlpm-fig4` counts the
CPU time of decisions, and `validation` starts real replicas. It runs by itself:
`python -m workloads.experiments.validation --publish`.

Absolute numbers depend on a cost model of a GPU and are not the papers'. What is compared is order, ratio and
shape: who is served, how evenly, how fast, and how much caching saves.

Each section says which *stall bound* replicas had (`--stall-ms`): the longest step for prompts while others have
requests. The papers' engines have none and compute prompts first, so most experiments do; replicas of this project have
one by default. What that changes is told for Figure 7 of DLPM, which has both.
"""

_NO_BOUND = "none, prompts go first"
MOST_NAMED = 4
"""So many cells with one stall bound, where others have another, are named; of more there is the number."""

HOLDS = {"yes": "yes", "partly": "partly", "no": "**no**"}


@dataclass(frozen=True, slots=True)
class Reported:
    """An experiment and what its records say."""

    experiment: Experiment
    records: Sequence[Record]
    report: Report
    """Empty if something lacks."""
    lacks: str = ""
    """What is shown in place of a report."""
    failed: bool = False
    """Whether the records are complete and make no report."""

    @property
    def title(self) -> str:
        return f"{self.experiment.id}: {self.experiment.title}"

    @property
    def anchor(self) -> str:
        """The link that Git hosts make of the heading: small letters, spaces as hyphens, no punctuation."""
        kept = [letter for letter in self.title.lower() if letter.isalnum() or letter in " -_"]
        return "".join(kept).replace(" ", "-")


def reports(records: Sequence[Record], experiments: Mapping[str, Experiment]) -> list[Reported]:
    """A report for each experiment with records, in the registry's order."""
    found = []
    for name, experiment in experiments.items():
        mine = [record for record in records if record.experiment == name]
        sizes = {record.size for record in mine}
        if len(sizes) > 1:
            raise ValueError(f"{name}: quick and full records in one place; they are no one result")
        cells = {cell.name: cell for size in sizes for cell in experiment.cells(size)}
        mine = [one for one in mine if one.name in cells and one.of(cells[one.name])]
        if cells:
            found.append(_reported(experiment, mine, cells.values()))
    return found


def _reported(experiment: Experiment, records: Sequence[Record], cells: Iterable[Cell]) -> Reported:
    had = {(record.name, record.seed): record.measured for record in records}
    missing = [cell.name for cell in cells if any((cell.name, seed) not in had for seed in cell.seeds)]
    if missing:
        return Reported(experiment, records, Report(), f"Not complete: without {', '.join(missing)}.")
    at = {cell.name: Result(cell, [had[cell.name, seed] for seed in cell.seeds]) for cell in cells}
    try:
        return Reported(experiment, records, Report(experiment.report(at)))
    except Exception as error:  # whatever one experiment gets wrong, the others are reported
        return Reported(experiment, records, Report(), f"No report: {type(error).__name__}: {error}.", True)


def page(records: Sequence[Record], experiments: Mapping[str, Experiment], plots: str = "results") -> str:
    """The whole page, in Markdown. `plots` is the folder of the plots, seen from the page."""
    found = reports(records, experiments)
    parts = [INTRODUCTION, _overview(found), *(_section(one, plots) for one in found)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def figure_file(experiment: str, figure: Figure, suffix: str) -> str:
    """The name of a plot's file."""
    return f"{experiment}-{figure.name}.{suffix}"


def draw(found: Iterable[Reported], folder: Path, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw every figure into `folder`. Equal records give equal files. Raises ImportError without matplotlib."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one, suffix in product(found, suffixes):
        for figure in one.report.figures:
            path = folder / figure_file(one.experiment.id, figure, suffix)
            figure.save(path, DPI)
            written.append(path)
    return written


# ---- the parts of the page


def _overview(found: Sequence[Reported]) -> str:
    claims = [(one.experiment.source, one.anchor, claim) for one in found for claim in one.report.claims]
    yes, partly, no = (sum(claim.holds == verdict for *_, claim in claims) for verdict in HOLDS)
    rows = [
        (f"[{source}](#{anchor})", claim.text, claim.paper, claim.ours, HOLDS[claim.holds])
        for source, anchor, claim in claims
    ]
    differences = [
        f"- **{source}**: {claim.text}. Paper: {claim.paper}. Here: {claim.ours}. {claim.why}".rstrip()
        for source, _, claim in claims
        if claim.holds != "yes"
    ]
    head = f"Of {len(rows)} claims {yes} hold here, {partly} hold in part, {no} do not."
    table = _markdown(("source", "claim", "paper", "here", "holds"), rows, words=5)
    parts = ["## Every claim", head, table]
    if differences:
        parts += ["## Where we differ, and why", "\n".join(differences)]
    return "\n\n".join(parts)


def _section(one: Reported, plots: str) -> str:
    name, report = one.experiment.id, one.report
    about = f"*{one.experiment.source}* (`{name}`). {plain(one.experiment.about)}"
    parts = [f"## {one.title}", about, *([_stall_bounds(one)] if one.records else [])]
    if one.lacks:
        parts.append(one.lacks)
    if report.claims:
        rows = [(claim.text, claim.paper, claim.ours, HOLDS[claim.holds]) for claim in report.claims]
        parts.append(_markdown(("claim", "paper", "here", "holds"), rows, words=4))
    for table in report.tables:
        rows_of = _markdown(table.columns, table.rows, digits=table.digits)
        parts.append(f"**{plain(table.title)}**\n\n{rows_of}")
    for figure in report.figures:
        path = f"{plots}/{figure_file(name, figure, 'png')}"
        caption = plain(figure.caption)
        parts.append(f"![{caption}]({path})\n\n{caption}")
    return "\n\n".join([*parts, *map(plain, report.notes), _provenance(one.records)])


def _stall_bounds(one: Reported) -> str:
    """Which bound on prefill steps the replicas had, by the records' own cells."""
    titles = {cell.name: cell.title for cell in one.experiment.cells(one.records[0].size)}
    found: dict[str, dict[str, None]] = {}
    for record in one.records:
        site = record.cell["site"]
        if one.experiment.bounds_steps and POLICIES[site["policy"]].shares_steps:
            bound = _stall_bound(site["stall_ms"], site["target_tpot_ms"], site["mixed_chunk"])
            found.setdefault(bound, {})[titles[record.name]] = None
    if not set(found) - {_NO_BOUND}:
        return f"Stall bound: {_NO_BOUND}. The default is {Cluster.stall_ms:g} ms."
    if len(found) == 1:
        return f"Stall bound: {next(iter(found))}."
    cells = [
        ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} cells" for names in found.values()
    ]
    parts = [f"{bound} ({names})" for bound, names in zip(found, cells, strict=True)]
    return f"Stall bound: {'; '.join(parts)}."


def _stall_bound(stall_ms: float, target_tpot_ms: float | None, mixed_chunk: bool | None) -> str:
    if not stall_ms:
        return _NO_BOUND
    default = ", the default" if stall_ms == Cluster.stall_ms else ""
    if target_tpot_ms is None:
        target = "the default target"
    else:
        target = f"a target of {target_tpot_ms:g} ms" if target_tpot_ms else "no target"
    return f"{stall_ms:g} ms{default}, with {target}" + (", steps in turn" if mixed_chunk is False else "")


def _provenance(records: Sequence[Record]) -> str:
    if not records:
        return ""
    wall_s, simulated_s = (sum(getattr(one, what) for one in records) for what in ("wall_s", "simulated_s"))
    commits, pythons = (
        ", ".join(sorted({record.versions.get(what, "?") for record in records}))
        for what in ("commit", "python")
    )
    many = "run" if len(records) == 1 else "runs"
    return (
        f"<sub>{len(records)} {records[0].size} {many}, {simulated_s / 3600:.1f} simulated replica hours in "
        f"{wall_s:.0f} s of computing; commit {commits}; Python {pythons}.</sub>"
    )


def _markdown(
    head: Sequence[str], rows: Sequence[Sequence[Entry]], *, words: int = 1, digits: int = 3
) -> str:
    """A Markdown table. The first `words` columns are text, the others are numbers, set to the right."""
    rule = ["---" if place < words else "---:" for place in range(len(head))]
    lines = [head, rule, *([shown(value, digits) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
