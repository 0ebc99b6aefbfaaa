"""From records to the page of results and its plots. Nothing here runs or measures.

An experiment is reported when all cells of its records' size are there. Until then the page says what is missing, and
if a report fails, why. Records of cells that the experiment no longer has, or has changed, are left out.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_fair.core import POLICIES
from sglang_fair.settings.table import Cluster
from workloads.experiments.claims import Claim, Report, Table, plain, shown
from workloads.experiments.contract import Cell, Experiment, Result, Size
from workloads.experiments.plots import Figure
from workloads.experiments.store import Record

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
    missing: Sequence[str]
    """Cells without a record. If there are any, there is no report."""
    report: Report | None
    error: str = ""
    """Why complete records make no report, in one line."""

    @property
    def lacks(self) -> str:
        """What is shown in place of a report."""
        return (
            f"No report: {self.error}." if self.error else f"Not complete: without {', '.join(self.missing)}."
        )


def reports(records: Sequence[Record], experiments: Mapping[str, Experiment]) -> list[Reported]:
    """A report for each experiment with records, in the registry's order."""
    found = []
    for name, experiment in experiments.items():
        mine = [record for record in records if record.experiment == name]
        if not mine:
            continue
        cells = {cell.name: cell for cell in experiment.cells(_size(mine))}
        mine = [r for r in mine if r.name in cells and r.of(cells[r.name], experiment.version)]
        had = {(record.name, record.seed) for record in mine}
        missing = [c.name for c in cells.values() if any((c.name, seed) not in had for seed in c.seeds)]
        found.append(Reported(experiment, mine, missing, *_report(experiment, mine, missing, cells)))
    return found


def _report(
    experiment: Experiment, records: Sequence[Record], missing: Sequence[str], cells: Mapping[str, Cell]
) -> tuple[Report | None, str]:
    """Its report, or why there is none."""
    if missing:
        return None, ""
    try:
        return Report(experiment.report(results_of(records, cells))), ""
    except Exception as error:  # whatever one experiment gets wrong, the others are reported
        return None, f"{type(error).__name__}: {error}"


def results_of(records: Sequence[Record], cells: Mapping[str, Cell]) -> dict[str, Result]:
    """By cell, in the order of `cells`; runs in the order of seeds."""
    found = {}
    for name, cell in cells.items():
        mine = {record.seed: record for record in records if record.name == name}
        found[name] = Result(cell, [mine[seed].measured for seed in cell.seeds])
    return found


def page(records: Sequence[Record], experiments: Mapping[str, Experiment], plots: str = "results") -> str:
    """The whole page, in Markdown. `plots` is the folder of the plots, seen from the page."""
    told = reports(records, experiments)
    parts = [INTRODUCTION, _summary(told), _differences(told)]
    parts += [_section(one, plots) for one in told]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def figure_file(experiment: str, figure: Figure, suffix: str) -> str:
    """The name of a plot's file."""
    return f"{experiment}-{figure.name}.{suffix}"


def draw(told: Iterable[Reported], folder: Path, suffixes: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Draw every figure into `folder`. Equal records give equal files. Raises ImportError without matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in told:
        for figure in one.report.figures if one.report else ():
            for suffix in suffixes:
                path = folder / figure_file(one.experiment.id, figure, suffix)
                with rc_context({"svg.hashsalt": "sglang-fair", "svg.fonttype": "none"}):
                    canvas = Canvas(figsize=figure.inches, layout="constrained")
                    figure.draw(canvas)
                    canvas.savefig(path, dpi=DPI, metadata=_METADATA[suffix])
                written.append(path)
    return written


_METADATA: Mapping[str, dict[str, str | None]] = {"png": {"Software": None}, "svg": {"Date": None}}


def _size(records: Sequence[Record]) -> Size:
    sizes = {record.size for record in records}
    if len(sizes) > 1:
        raise ValueError(
            f"{records[0].experiment}: quick and full records in one place; they are no one result"
        )
    return records[0].size


# ---- the parts of the page


def _summary(told: Sequence[Reported]) -> str:
    rows = [
        (
            f"[{one.experiment.source}](#{_anchor(one)})",
            claim.text,
            claim.paper,
            claim.ours,
            HOLDS[claim.holds],
        )
        for one in told
        if one.report
        for claim in one.report.claims
    ]
    claims = [claim for one in told if one.report for claim in one.report.claims]
    counts = {verdict: sum(claim.holds == verdict for claim in claims) for verdict in HOLDS}
    head = (
        f"## Every claim\n\nOf {len(claims)} claims {counts['yes']} hold here, {counts['partly']} hold in part, "
        f"{counts['no']} do not.\n\n"
    )
    return head + _markdown(("source", "claim", "paper", "here", "holds"), rows, words=5)


def _differences(told: Sequence[Reported]) -> str:
    lines = [
        f"- **{one.experiment.source}**: {claim.text}. Paper: {claim.paper}. Here: {claim.ours}. {claim.why}".rstrip()
        for one in told
        if one.report
        for claim in one.report.claims
        if claim.holds != "yes"
    ]
    return "## Where we differ, and why\n\n" + "\n".join(lines) if lines else ""


def _section(one: Reported, plots: str) -> str:
    name = one.experiment.id
    about = f"*{one.experiment.source}* (`{name}`). {plain(one.experiment.about)}"
    parts = [f"## {_section_title(one)}", about, *([_stall_bounds(one)] if one.records else [])]
    if one.report is None:
        parts.append(one.lacks)
    else:
        parts += [_claims(one.report.claims)] if one.report.claims else []
        parts += [_table(table) for table in one.report.tables]
        for figure in one.report.figures:
            path = f"{plots}/{figure_file(name, figure, 'png')}"
            parts.append(f"![{figure.caption}]({path})\n\n{figure.caption}")
        parts += one.report.notes
    parts.append(_provenance(one.records))
    return "\n\n".join(parts)


def _stall_bounds(one: Reported) -> str:
    """Which bound on prefill steps the replicas had, by the records' own cells."""
    titles = {cell.name: cell.title for cell in one.experiment.cells(_size(one.records))}
    found: dict[str, dict[str, None]] = {}
    for record in one.records:
        site = record.cell["site"]
        if one.experiment.bounds_steps and POLICIES[site["policy"]].shares_steps:
            bound = _stall_bound(site["stall_ms"], site["target_tpot_ms"])
            found.setdefault(bound, {})[titles[record.name]] = None
    if not set(found) - {_NO_BOUND}:
        return f"Stall bound: {_NO_BOUND}. The default is {Cluster.stall_ms:g} ms."
    if len(found) == 1:
        return f"Stall bound: {next(iter(found))}."
    parts = [
        f"{bound} ({', '.join(names) if len(names) <= MOST_NAMED else f'{len(names)} cells'})"
        for bound, names in found.items()
    ]
    return f"Stall bound: {'; '.join(parts)}."


def _stall_bound(stall_ms: float, target_tpot_ms: float | None) -> str:
    if not stall_ms:
        return _NO_BOUND
    default = ", the default" if stall_ms == Cluster.stall_ms else ""
    if target_tpot_ms is None:
        target = "the default target"
    else:
        target = f"a target of {target_tpot_ms:g} ms" if target_tpot_ms else "no target"
    return f"{stall_ms:g} ms{default}, with {target}"


def _section_title(one: Reported) -> str:
    return f"{one.experiment.id}: {one.experiment.title}"


def _anchor(one: Reported) -> str:
    """The link that Git hosts make of a heading: small letters, spaces as hyphens, no punctuation."""
    kept = [letter for letter in _section_title(one).lower() if letter.isalnum() or letter in " -_"]
    return "".join(kept).replace(" ", "-")


def _claims(claims: Sequence[Claim]) -> str:
    rows = [(claim.text, claim.paper, claim.ours, HOLDS[claim.holds]) for claim in claims]
    return _markdown(("claim", "paper", "here", "holds"), rows, words=4)


def _table(table: Table) -> str:
    return f"**{table.title}**\n\n" + _markdown(table.columns, table.rows, digits=table.digits)


def _provenance(records: Sequence[Record]) -> str:
    if not records:
        return ""
    wall_s, simulated_s = (
        sum(record.wall_s for record in records),
        sum(record.simulated_s for record in records),
    )
    commits = sorted({record.versions.get("commit", "?") for record in records})
    many = "run" if len(records) == 1 else "runs"
    return (
        f"<sub>{len(records)} {records[0].size} {many}, {simulated_s / 3600:.1f} simulated replica hours in "
        f"{wall_s:.0f} s of computing; commit {', '.join(commits)}; Python "
        f"{', '.join(sorted({record.versions.get('python', '?') for record in records}))}.</sub>"
    )


def _markdown(
    head: Sequence[str], rows: Sequence[Sequence[str | float | None]], *, words: int = 1, digits: int = 3
) -> str:
    """A Markdown table. The first `words` columns are text, the others are numbers, set to the right."""
    rule = ["---" if place < words else "---:" for place in range(len(head))]
    lines = [head, rule, *([shown(value, digits) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
