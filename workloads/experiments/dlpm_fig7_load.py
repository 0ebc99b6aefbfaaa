"""What Figure 7's ratios depend on: load, the run's length, limits of a replica, quanta. And the capacity from which
all rates follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workloads.clients import SCENARIOS
from workloads.experiments import dlpm_fig7_setting as setting
from workloads.experiments.claims import shown
from workloads.experiments.contract import Cell, Json, Result, Size, TrafficSpec
from workloads.experiments.dlpm_fig7_setting import KINDS, LOAD

SCENARIO, REPLICAS = "tot-s1", 2
COMPARED = ("d2lpm", "rr", "vtc")


@dataclass(frozen=True, slots=True)
class SettingVariant:
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
        """Whether it makes a difference to D2LPM alone."""
        return (self.quantum_factor, self.worker_quantum_factor) != (1, 1)

    def site_fields(self) -> dict[str, Json]:
        """The fields of the site that it changes."""
        kind = KINDS[SCENARIOS[SCENARIO].app]
        given = {
            "max_running": self.max_running,
            "kv_tokens": self.kv_tokens,
            "quantum": kind.quantum * self.quantum_factor,
            "worker_quantum": kind.worker_quantum * self.worker_quantum_factor,
        }
        return {name: value for name, value in given.items() if value is not None}


VARIANTS: Mapping[str, SettingVariant] = {
    "base": SettingVariant("as in Figure 7"),
    "load-0.8": SettingVariant("rates at 80 % of an equal share", load=0.8),
    "load-1.2": SettingVariant("rates at 120 % of an equal share", load=1.2),
    "short": SettingVariant("arrivals for 2 minutes", duration_s=120.0),
    "long": SettingVariant("arrivals for 8 minutes", duration_s=480.0),
    "running": SettingVariant("at most 2,048 requests run, SGLang's default", max_running=2048),
    "pool": SettingVariant("a KV pool of 100,000 tokens", kv_tokens=100_000),
    "small-qu": SettingVariant("Q^u an eighth", quantum_factor=1 / 8),
    "large-qu": SettingVariant("Q^u eight times", quantum_factor=8.0),
    "small-qw": SettingVariant("Q^w a sixteenth", worker_quantum_factor=1 / 16),
}


class Sensitivity(setting.ScenarioExperiment):
    id = "dlpm-fig7-load"

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

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        settings = [_gains(results, name) for name in VARIANTS if f"{name}-d2lpm" in results]
        return {
            "settings": settings,
            "by_name": {one["cell"].removesuffix("-d2lpm"): one for one in settings},
            "capacities": [
                {
                    "cell": f"flood-{name}",
                    "title": kind.title,
                    "charged": kind.charged,
                    "taken": kind.capacity_per_s,
                    "rate": shown(kind.rate_per_s(1)),
                }
                for name, kind in KINDS.items()
            ],
        }


def _flood(kind: str, duration_s: float) -> Cell:
    """Well-behaved clients that ask for half as many programs again as one replica completes."""
    traffic = TrafficSpec(f"{kind}-s1", {"rate_per_s": KINDS[kind].rate_per_s(1, 2.0), "with_bad": False})
    plan = replace(setting.plan(duration_s), drain_s=0.0)
    return Cell(f"flood-{kind}", setting.site("d2lpm", kind, 1), traffic, plan)


def _cell(name: str, variant: SettingVariant, scheduler: str) -> Cell:
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


def _gains(results: Mapping[str, Result], name: str) -> dict[str, Json]:
    """D2LPM's gains in one setting, each with two digits behind the point, and everybody's Jain's index."""
    others = "base" if VARIANTS[name].changes_quanta else name
    ours = results[f"{name}-d2lpm"]
    found: dict[str, Json] = {
        "cell": f"{name}-d2lpm",
        "title": VARIANTS[name].title,
        "jain": ours.shown("jain"),
    }
    for other in ("rr", "vtc"):
        theirs = results[f"{others}-{other}"]
        found |= {
            f"throughput_{other}": _over(ours, theirs, "service_rate"),
            f"p50_{other}": _over(theirs, ours, "p50_s"),
            f"p99_{other}": _over(theirs, ours, "p99_s"),
            f"jain_{other}": theirs.shown("jain"),
        }
    return found


def _over(more: Result, less: Result, path: str) -> str:
    return f"{more.number(path) / less.number(path):.2f}"
