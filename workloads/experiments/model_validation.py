"""How far the models are from what they model: one traffic on a real engine, an emulated one and a simulated one.

    bench   one replica of the model `bench` on this machine's processor, calibrated first; SGLang's scheduler over
            a clock that keeps the calibration's time; the simulator with the same
    a100    two A100 with an 8B model, which this machine does not have: the emulated engines and the simulator

The real engine runs everything twice, and models are compared with the mean: how far its own runs differ from the mean
is the least that can be asked of a model. Servers share the machine with their own driver, so this experiment runs by
itself (`validation`) and is not in the registry. Latencies differ most: answers here are 16 and 32 tokens long, so that
one step more or less, which an engine that schedules ahead takes, shows.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from sglang_fair.calibration.measure import calibrate
from sglang_fair.settings import table
from sglang_fair.sim.cost_model import to_json
from workloads import records
from workloads.clients import SCENARIOS, SMALL, Client, Scale
from workloads.clusters import Cluster, SpawnCluster, drive, verify
from workloads.experiments.claims import Entry, Part, Table, at_most
from workloads.experiments.contract import Cell, Experiment, Json, Measured, Result, Row, TrafficSpec
from workloads.measures import prices, summarize
from workloads.plots import Figure, Panel
from workloads.programs import Codec, PackedCodec, TokenCodec
from workloads.records import Run
from workloads.runs.comparison import burst, completed, rate_at
from workloads.session import Plan
from workloads.simulation import Site, simulate
from workloads.table import Requests

WORKLOADS = ("tot-s1", "judge-s1")

LONGEST_TOKENS = 2048
"""No context of the workloads is longer."""

CURVE_POINTS = 60

CALIBRATED = ("cost_model", "fit", "scheduling_s", "hop_s", "server")

GOALS = {"throughput": 0.10, "service": 0.10, "hit_rate": 0.05}
"""Deviations that are good enough: relative, but the hit rate's, which is a difference."""

BENCH = Site(
    gpu="cpu", model="bench", quantum=500.0, worker_quantum=16_000.0, kv_tokens=24_576, max_running=16,
    chunked_prefill_tokens=1024, stall_ms=0.0,
)  # fmt: skip
"""As `sglang-fair compare` runs it, with two differences: a second replica would share the cores, and longer chunks
do not fit this kind of processor's cache, so that their time would not be linear."""

A100_TIME_SCALE = 5.0
"""The emulated A100s are slowed down so many times, so that this machine keeps up."""

A100 = Site(
    quantum=500.0, worker_quantum=16_000.0, replicas=2, max_running=64, chunked_prefill_tokens=8192, stall_ms=0.0
)  # fmt: skip

BYTES: Codec = TokenCodec(lambda text: tuple(text.encode()))
"""One token for each byte, for the live engines; the simulator's codec cuts texts at the same places."""


ENGINES = ("real", "real again", "emulated", "simulated")
"""Of a cell in this order, as far as it has them. `real again` is a second run of `real`."""


class Validation(Experiment):
    id = "validation"
    title = "The emulated engine and the simulator beside the real engine"
    source = "this project"
    about = f"""One misbehaving client, small trees and judgements, one seed. `bench`: one replica of the model
        `bench` on this machine's CPU, run twice, and the two models of it, calibrated first. `a100`: two replicas of
        an A100 with an 8B model, emulated {A100_TIME_SCALE:.0f} times slower than they are, and simulated."""

    lengths_s = (25.0, 8.0)
    seeds = ("0",)

    def plan(self, length_s: float) -> Plan:
        return Plan(length_s, drain_s=8.0 if length_s == self.lengths_s[0] else 4.0, drain_for="well-behaved")

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for name, site, engines, scale in (
            ("bench", BENCH, ENGINES, 1.0),
            ("a100", A100, ENGINES[2:], A100_TIME_SCALE),
        ):
            sent = {"engines": list(engines), "time_scale": scale, "scale": asdict(SMALL)}
            yield Row(name, site, TrafficSpec("one-bad-client", sent))

    def run(self, cell: Cell, seed: str) -> Measured:
        with TemporaryDirectory(prefix="validation-") as folder:
            return Measured(_Validate(cell, seed, Path(folder)).run(), cell.simulated_s * len(WORKLOADS))

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        told = [
            (site, workload, engine, runs[engine])
            for site, result in at.items()
            for workload, runs in result.first["workloads"].items()
            for engine in ENGINES
            if engine in runs
        ]
        offs = [one["deviation"] for _, _, engine, one in told if not engine.startswith("real")]
        worst = {goal: _worst(goal, [off[goal] for off in offs if off]) for goal in GOALS}
        beyond = max(worst[goal] / enough for goal, enough in GOALS.items())
        yield at_most(beyond, 1, 1.5).claim(f"""Models agree with what they model in throughput, in each
            client's service over time and in hit rate | {GOALS["throughput"]:.0%}, {GOALS["service"]:.0%},
            {100 * GOALS["hit_rate"]:.0f} points (our own goal) | {worst["throughput"]:.0%},
            {worst["service"]:.0%}, {100 * worst["hit_rate"]:.0f} points at worst | The judges' requests share
            long prefixes. On a CPU the keys and values that the whole batch attends to are in the cache and
            are read once, so the batch takes less time than one without common prefixes; the cost model
            counts them for each request. Trees are faster in the simulator than in fact because the
            scheduler's work grows with the queue.""")
        yield Table(
            "Each engine, and how far it is from the real one, or from the emulated one where nothing is real",
            """site | workload | engine | tokens/s | tokens/s, off | service curves, off | hit rate | hit rate, off |
                P50, s | P50, off | P99, s | P99, off""",
            [
                [site, workload, engine, *_row(one["numbers"], one["deviation"])]
                for site, workload, engine, one in told
            ],
        )
        for site, workload in product(("bench", "a100"), sorted(WORKLOADS)):
            if runs := [one for one in told if one[:2] == (site, workload)]:
                length_s = at[site].cell.plan.duration_s
                times = [length_s * (point + 1) / CURVE_POINTS for point in range(CURVE_POINTS)]
                panels = []
                for *_, engine, one in runs:
                    lines = {client: (times, curve) for client, curve in one["curves"].items()}
                    panels.append(Panel("service received, units", lines, title=engine))
                caption = f"{site}, {workload}: service of each client over time on each engine"
                yield Figure(f"{site}-{workload}", caption, [panels])
        if calibration := at["bench"].first["calibration"]:
            fit = calibration["fit"]["all"]
            yield f"""The calibration's fit is off by {fit["median"]:.0%} at the median of its measurements and by
                {fit["p90"]:.0%} at their P90; scheduling under load adds {1000 * calibration["scheduling_s"]:.2f} ms
                to a step."""


def _worst(goal: str, off: Sequence[float | None]) -> float:
    """The largest deviation. Raises ValueError if one is unknown: a missing number is no agreement."""
    known = [abs(one) for one in off if one is not None]
    if not known or len(known) < len(off):
        raise ValueError(f"{len(off) - len(known)} of {len(off)} deviations of {goal} are not known")
    return max(known)


def _row(numbers: Mapping[str, Any], off: Mapping[str, Any] | None) -> list[Entry]:
    """A run's numbers and their deviations, which are empty for the engine that is the reference."""

    def both(name: str, spec: str = "+.0%", unit: str = "") -> list[Entry]:
        known = off is not None and off[name] is not None
        return [numbers.get(name), f"{(100 if unit else 1) * off[name]:{spec}}{unit}" if known else ""]  # type: ignore[index]

    return [
        *both("throughput"),
        *both("service", ".1%")[1:],
        *both("hit_rate", "+.1f", " points"),
        *both("p50_s"),
        *both("p99_s"),
    ]


class _Validate:
    def __init__(self, cell: Cell, seed: str, folder: Path) -> None:
        self.cell, self.seed, self.folder, self.site = cell, seed, folder, cell.site
        self.scale, self.rates = Scale(**cell.traffic.arguments["scale"]), dict[str, float]()
        self.runs: dict[str, dict[str, Run]] = {workload: {} for workload in WORKLOADS}

    def run(self) -> dict[str, Json]:
        found, names = None, self.cell.traffic.arguments["engines"]
        if "real" in names:
            with self._cluster("real") as cluster:
                found = asyncio.run(calibrate(cluster.replicas[0], longest_tokens=LONGEST_TOKENS,
                                              seed=int(self.seed), say=_say))  # fmt: skip
                self.site = replace(self.site, hop_s=found["hop_s"])
                self._use(found)
                self._drive(cluster, "real", "real again")
        else:
            model = to_json(self.site.make_cost_model())
            self._use({"kind": "scaled", "factor": self.cell.traffic.arguments["time_scale"], "model": model})
        with self._cluster("emulated") as cluster:
            self._drive(cluster, "emulated")
        for workload in WORKLOADS:
            clients = self._clients(workload, PackedCodec())
            self.runs[workload]["simulated"] = simulate(self.site, clients, self.cell.plan, seed=self.seed)
        return {
            "calibration": found and {name: found[name] for name in CALIBRATED},
            "hop_s": self.site.hop_s,
            "rates_per_s": self.rates,
            "workloads": {workload: compared(names, self.runs[workload]) for workload in WORKLOADS},
        }

    def _use(self, model: Mapping[str, Json]) -> None:
        """This cost model from now on; clients' rates are a part of what the simulated site then completes of a burst
        of good programs."""
        path = self.folder / "model.json"
        path.write_text(json.dumps(model), encoding="utf-8")
        self.site = replace(self.site, cost_model=str(path))
        for workload in WORKLOADS:
            each = 16 if SCENARIOS[workload].app == "judge" else 4
            clients = burst(workload, self.scale, PackedCodec(), seed=self.seed)
            plan = Plan(duration_s=600.0, programs_per_client=each, drain_s=None)
            count, last_s = completed(simulate(self.site, clients, plan, seed=self.seed))
            self.rates[workload] = rate_at(count / last_s, workload, self.scale)

    @contextmanager
    def _cluster(self, engine: str) -> Iterator[Cluster]:
        site = self.site
        arguments = ["--max-running-requests", str(site.max_running)]
        arguments += ["--chunked-prefill-size", str(site.chunked_prefill_tokens)]
        if site.kv_tokens is not None:
            arguments += ["--max-total-tokens", str(site.kv_tokens)]
        if engine == "real":
            arguments += ["--disable-overlap-schedule"]
            given: Json = {"model": site.model, "device": "cpu"}
        else:
            given = {
                "model": "llama-3.1-8b",
                "engine": "emulated",
                "gpu": "a100-80g",
                "cost_model": site.cost_model,
            }
        given |= {"quantum": site.quantum, "worker_quantum": site.worker_quantum, "stall_ms": site.stall_ms}
        settings = table.Cluster(replicas=site.replicas, extra=tuple(arguments), **given)
        with SpawnCluster(settings, self.folder)(site.placement, site.policy) as cluster:
            verify(cluster, site.placement, site.policy)
            yield cluster

    def _drive(self, cluster: Cluster, *engines: str) -> None:
        for engine, workload in product(engines, WORKLOADS):
            clients, named = self._clients(workload, BYTES), engine.replace(" ", "-")
            of = records.Cell(workload, self.site.scheduler, seed=f"{self.seed}.{named}")
            self.runs[workload][engine], _ = drive(cluster, clients, self.cell.plan, of, sampled=True)
            _say(f"{engine} on {workload}: {len(self.runs[workload][engine].requests)} requests")

    def _clients(self, workload: str, codec: Codec) -> tuple[Client, ...]:
        return SCENARIOS[workload].clients(
            scale=self.scale, rate_per_s=self.rates[workload], codec=codec, first_s=0.0, seed=self.seed
        )


# ---- what is compared


def compared(names: Sequence[str], runs: Mapping[str, Run]) -> dict[str, Json]:
    """Numbers and curves of each run, and their deviation from the mean of the real engine's runs, or from the first
    run where there is no real one."""
    found = {name: {"numbers": numbers(runs[name]), "curves": curves(runs[name])} for name in names}
    real = [found[name] for name in names if name.startswith("real")] or [found[names[0]]]
    return {
        name: one | {"deviation": None if real == [one] else deviation(real, one)}
        for name, one in found.items()
    }


def numbers(run: Run) -> dict[str, Json]:
    """Latencies are those of the well-behaved clients' programs."""
    found = summarize(run)
    return {
        "throughput": found.throughput_tokens_per_s,
        "hit_rate": found.hit_rate,
        "p50_s": found.well_behaved_p50_s,
        "p99_s": found.well_behaved_p99_s,
    }


def curves(run: Run) -> dict[str, list[float]]:
    """Each client's service received so far, at `CURVE_POINTS` evenly spaced times up to the end of arrivals."""
    meters = Requests(run).curves(prices(run), "actual")
    assert meters is not None, "engines report what was cached"
    times = [run.manifest.duration_s * (point + 1) / CURVE_POINTS for point in range(CURVE_POINTS)]
    return {name: [curve.at(time_s) for time_s in times] for name, curve in meters.items()}


def deviation(reference: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> dict[str, float | None]:
    """How far `other` is from the mean of `reference`: relative, but the hit rate's. `service` is the largest
    distance between two curves of one client at any time, as a part of all clients' service at the end."""
    mine = {
        name: [fmean(values) for values in zip(*(each["curves"][name] for each in reference), strict=True)]
        for name in other["curves"]
    }
    total = sum(curve[-1] for curve in mine.values())
    apart = max(abs(a - b) for name in mine for a, b in zip(mine[name], other["curves"][name], strict=True))
    off: dict[str, float | None] = {"service": apart / total if total else None}
    for name, value in other["numbers"].items():
        known = [each["numbers"][name] for each in reference if each["numbers"][name] is not None]
        away = value - fmean(known) if known and value is not None else None
        is_part = away is not None and name != "hit_rate"
        off[name] = (away / fmean(known) if fmean(known) else None) if is_part else away  # type: ignore[operator]
    return off


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
