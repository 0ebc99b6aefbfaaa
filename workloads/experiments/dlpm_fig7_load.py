"""What Figure 7's ratios depend on: load, the run's length, limits of a replica, quanta; and the capacity that rates
follow from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workloads.clients import SCENARIOS, Client
from workloads.experiments import dlpm_fig7_setting as setting
from workloads.experiments.contract import Cell, Json, Report, Result, Simulated, Size, Table, Traffic, shown
from workloads.experiments.dlpm_fig7_setting import KINDS, LOAD
from workloads.records import Run

SCENARIO, REPLICAS = "tot-s1", 2
COMPARED = ("d2lpm", "rr", "vtc")


@dataclass(frozen=True, slots=True)
class Variant:
    """The setting with one thing changed. Factors are those of the setting's own."""

    title: str
    load: float = LOAD
    duration_s: float = 240.0
    max_running: int | None = None
    kv_tokens: int | None = None
    quantum_factor: float = 1.0
    worker_quantum_factor: float = 1.0

    @property
    def changes_quanta(self) -> bool:
        """Whether it is another setting for D2LPM alone."""
        return (self.quantum_factor, self.worker_quantum_factor) != (1, 1)

    def site_fields(self) -> dict[str, Json]:
        """What it changes in a cluster."""
        kind = KINDS[SCENARIOS[SCENARIO].app]
        given = {
            "max_running": self.max_running,
            "kv_tokens": self.kv_tokens,
            "quantum": kind.quantum * self.quantum_factor,
            "worker_quantum": kind.worker_quantum * self.worker_quantum_factor,
        }
        return {name: value for name, value in given.items() if value is not None}


VARIANTS: Mapping[str, Variant] = {
    "base": Variant("as in Figure 7"),
    "load-0.8": Variant("rates at 80 % of an equal share", load=0.8),
    "load-1.2": Variant("rates at 120 % of an equal share", load=1.2),
    "short": Variant("arrivals for 2 minutes", duration_s=120.0),
    "long": Variant("arrivals for 8 minutes", duration_s=480.0),
    "running": Variant("at most 2,048 requests run, SGLang's default", max_running=2048),
    "pool": Variant("a KV pool of 100,000 tokens", kv_tokens=100_000),
    "small-qu": Variant("Q^u an eighth", quantum_factor=1 / 8),
    "large-qu": Variant("Q^u eight times", quantum_factor=8.0),
    "small-qw": Variant("Q^w a sixteenth", worker_quantum_factor=1 / 16),
}


class Load(Simulated):
    id = "dlpm-fig7-load"
    title = "What Figure 7's ratios depend on"
    source = "this project, around DLPM's Figure 7"
    about = (
        "S1 of tree of thoughts on two A100s with one thing changed at a time, run until the last program of a "
        "well-behaved client has ended; and the overload by "
        "well-behaved clients on one replica that gives the capacity from which all rates follow."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        variants = VARIANTS if full else {name: VARIANTS[name] for name in ("base", "load-1.2", "small-qu")}
        return [
            *(_flood(kind, 240.0 if full else 15.0) for kind in KINDS),
            *(
                _cell(name, variant if full else replace(variant, duration_s=15.0), scheduler)
                for name, variant in variants.items()
                for scheduler in COMPARED
                if scheduler == "d2lpm" or not variant.changes_quanta
            ),
        ]

    def clients(self, cell: Cell, seed: str) -> Sequence[Client]:
        return setting.clients(cell, seed)

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return setting.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        return Report(
            tables=[_table(results), _capacities(results)],
            notes=[*_of_length(results), *_of_running(results)],
        )


def _flood(kind: str, duration_s: float) -> Cell:
    """Half as many programs again as one replica completes, of well-behaved clients only."""
    traffic = Traffic(f"{kind}-s1", {"rate_per_s": KINDS[kind].rate_per_s(1, 2.0), "with_bad": False})
    plan = replace(setting.plan(duration_s), drain_s=0.0)
    return Cell(f"flood-{kind}", setting.site("d2lpm", kind, 1), traffic, plan)


def _cell(name: str, variant: Variant, scheduler: str) -> Cell:
    """The well-behaved clients' programs are waited for to the last, so that no latency is cut off."""
    cell = setting.cell(
        f"{name}-{scheduler}",
        SCENARIO,
        scheduler,
        REPLICAS,
        variant.duration_s,
        load=variant.load,
        **variant.site_fields(),
    )
    return replace(cell, plan=replace(cell.plan, drain_s=None))


def _table(results: Mapping[str, Result]) -> Table:
    rows = []
    for name, variant in VARIANTS.items():
        if f"{name}-d2lpm" not in results:
            continue
        others = "base" if variant.changes_quanta else name
        ours, rr, vtc = results[f"{name}-d2lpm"], results[f"{others}-rr"], results[f"{others}-vtc"]
        rows.append(
            (
                variant.title,
                _over(ours, vtc, "service_rate"),
                _over(ours, rr, "service_rate"),
                _over(vtc, ours, "p50_s"),
                _over(rr, ours, "p50_s"),
                _over(vtc, ours, "p99_s"),
                _over(rr, ours, "p99_s"),
                *(one.shown("jain") for one in (ours, vtc, rr)),
                ours.shown("p50_s"),
            )
        )
    return Table(
        "S1 tree of thoughts, D = 2: D2LPM's gains and Jain's indices",
        (
            "setting",
            "throughput, to VTC",
            "throughput, to RR+LPM",
            "P50, to VTC",
            "P50, to RR+LPM",
            "P99, to VTC",
            "P99, to RR+LPM",
            "Jain, D2LPM",
            "Jain, VTC",
            "Jain, RR+LPM",
            "P50 of D2LPM, s",
        ),
        rows,
    )


def _of_length(results: Mapping[str, Result]) -> list[str]:
    """How ratios depend on how long the overload lasts."""
    names = ("short", "base", "long")
    if any(f"{name}-d2lpm" not in results for name in names):
        return []

    def over(what: str, more: str, less: str) -> str:
        return ", ".join(_over(results[f"{name}-{more}"], results[f"{name}-{less}"], what) for name in names)

    jain = ", ".join(results[f"{name}-d2lpm"].shown("jain") for name in names)
    return [
        "A ratio of latencies under overload is no constant: what waits behind the bad client's backlog waits the "
        "longer, the longer the backlog has grown. So a largest ratio says as much about how long the overload lasted "
        f"as about a scheduler. After 2, 4 and 8 minutes of arrivals RR+LPM's P50 is {over('p50_s', 'rr', 'd2lpm')} "
        f"times D2LPM's, D2LPM's throughput {over('service_rate', 'd2lpm', 'rr')} times RR+LPM's, and its Jain's index "
        f"{jain}."
    ]


def _of_running(results: Mapping[str, Result]) -> list[str]:
    """How they depend on how many requests may run."""
    if "running-d2lpm" not in results:
        return []
    jain = {name: results[f"{name}-d2lpm"].shown("jain") for name in ("base", "running")}
    return [
        "What is admitted at once no order of admission can hold back: with at most 2,048 running requests in place of "
        f"256 D2LPM's Jain's index is {jain['running']} in place of {jain['base']}."
    ]


def _over(more: Result, less: Result, path: str) -> str:
    return f"{more.number(path) / less.number(path):.2f}"


def _capacities(results: Mapping[str, Result]) -> Table:
    rows = []
    for name, kind in KINDS.items():
        actual_rate = results[f"flood-{name}"].number("actual_rate")
        rate = shown(kind.rate_per_s(1))
        rows.append((kind.title, actual_rate, actual_rate / kind.charged, kind.capacity_per_s, rate))
    return Table(
        "Capacity of one A100 for well-behaved programs under DLPM",
        (
            "kind",
            "actual service, units/s",
            "programs/s",
            "as rates take it",
            "a client's rate with one replica",
        ),
        rows,
    )
