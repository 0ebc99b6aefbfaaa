"""Rules that others have published beside the default, in the settings of `beyond-placement`: what is worth taking?"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from workloads.experiments import beyond_placement as placement
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Part, Table, at_least, graded
from workloads.experiments.contract import Json, Result, Row, Scheduler, TrafficSpec
from workloads.experiments.dlpm_setting import DIFFERENCE, Point
from workloads.experiments.senders import conversations, sender, traffic
from workloads.session import Plan
from workloads.simulation import Site

GPUS = 4
PAUSES = "chat-pauses"
SETTINGS = ("judge-s1", "qa-s1", "tot-s1", placement.PRODUCTION, placement.TRACE, "chat-200", PAUSES)
QUICK = ("judge-s1", placement.PRODUCTION, PAUSES)

THINK_S, LONG_TURNS, POOL_TOKENS = 20.0, 8.0, 100_000
EACH = 100
"""Conversations under way, for each GPU."""
TAIL_TOKENS = 1024
"""Of a conversation, which are computed in a tenth of a second."""

DEFAULT, UNSHARED = "default", "unshared"
_QUEUES: Json = {"placement": "d2lpm-queue", "policy": "dlpm"}


class Rival(NamedTuple):
    """Someone else's rule."""

    scheduler: Scheduler
    is_fair: bool
    why: str
    """It is not the default."""


RIVALS: Mapping[str, Rival] = {
    "dualmap": Rival(
        Scheduler("DualMap", {"placement": "dualmap", "policy": "lpm"}), False, "nobody has a share"
    ),
    "dualmap-fair": Rival(
        Scheduler("DualMap over DLPM", {"placement": "dualmap", "policy": "dlpm"}), True, ""
    ),
    "klpm": Rival(Scheduler("k-LPM", _QUEUES | {"policy": "klpm"}), False, "nobody has a share"),
    "klpm-fair": Rival(Scheduler("k-LPM within clients", _QUEUES | {"policy": "klpm-fair"}), True, ""),
    "justitia": Rival(Scheduler("Justitia within clients", _QUEUES | {"policy": "justitia"}), True, ""),
    "tail-lru": Rival(Scheduler("T-LRU", _QUEUES | {"tail_tokens": TAIL_TOKENS}), True, ""),
}
CONTENDERS: Mapping[str, Scheduler] = {
    DEFAULT: Scheduler("the default", _QUEUES),
    UNSHARED: Scheduler("the default over LPM", _QUEUES | {"policy": "lpm"}),
    **{name: placement.CONTENDERS[name] for name in ("lmetric", "cache-aware")},
    **{name: rival.scheduler for name, rival in RIVALS.items()},
}

ENOUGH, AHEAD = 0.99, 0.95
"""A rule is better than the default where it has so much of its throughput at all points, and so much of its P99 in the
mean and nowhere more than all of it."""


class Frontier(placement.Contest):
    id = "beyond-frontier"
    title = "What others have published, beside the default"
    source = "beyond the papers; arXiv 2602.06502, 2502.04677, 2510.17015, 2510.15152, 2605.00528"
    bounds_steps = False
    about = f"""DualMap, k-LPM, Justitia's order of programs and Tail-Optimized LRU, each as small as its paper allows
        (`workloads/simulation/rivals.py`), beside the default (D2LPM by queues over DLPM), LMetric and cache_aware, on
        {GPUS} A100, in settings of `beyond-placement`, and with {EACH} conversations a GPU of {LONG_TURNS:.0f} turns
        with {THINK_S:.0f} s between two, in a cache of {POOL_TOKENS:,} tokens ({PAUSES}). k-LPM and Justitia are
        placed as the default is. T-LRU is the default with another order of eviction. Three seeds, medians."""

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        number = GPUS if full else 2
        for what in SETTINGS if full else QUICK:
            sent, plan = _load(what, number, full)
            for name, contender in CONTENDERS.items():
                site = _site(what, number, contender)
                yield Row(f"{what}-d{number}.{name}", site, sent, contender.label, plan)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        grid = _Grid(at)
        better = [name for name, rival in RIVALS.items() if rival.is_fair and grid.is_better(name)]
        found = "; ".join(f"{RIVALS[name].scheduler.label} {grid.words(name)}" for name in better)
        yield graded(
            not better
        ).claim(f"""No fair rule of others has the default's throughput everywhere and a
            lower P99 | | {found or "none has"} | """)
        unshared = {point: grid.over(UNSHARED, point, "rate", grid.best(point)) for point in grid.points}
        least, where = min((part, point) for point, part in unshared.items())
        yield at_least(
            least, 0.98, 0.95
        ).claim(f"""What the default lacks of the best throughput is what shares cost:
            over LPM, without shares, its placement has it | | at least {least:.3f}× the best ({where.setting}), mean
            {fmean(unshared.values()):.3f}× | """)
        rates = {point: grid.over(DEFAULT, point, "rate", grid.best(point)) for point in grid.points}
        slower = {name: grid.ratios(name, "program_mean_s") for name in ("lmetric", "cache-aware")}
        times = [ratio for one in slower.values() for ratio in one.values()]
        yield graded(
            min(times) > 0.98, fmean(times) > 1
        ).claim(f"""Tasks of the well-behaved clients take least
            time under the default | SAGA: 1/1.64 of the time, at 0.7 of the throughput | under LMetric and cache_aware
            {fmean(times):.2f}× as long in the mean, {min(times):.2f}× to {max(times):.2f}×, at
            {fmean(rates.values()):.3f} of the best throughput, at least {min(rates.values()):.3f} | """)
        yield Table(
            "Beside the default: over its numbers, mean over settings (least to most)",
            "rule | throughput | P99 | program time | shares | why it is not the default",
            [
                [CONTENDERS[name].label, *grid.cells(name), "yes" if rival.is_fair else "no", rival.why]
                for name, rival in RIVALS.items()
            ],
        )
        late = "latency of the well-behaved clients, s (> where the run ended before)"
        head = " | ".join(["setting", "D", *(one.label for one in CONTENDERS.values())])
        for field, what in {
            "rate": "Throughput: Figure 7 in units/s of service with prompts in full, others in tokens/s",
            "p50": f"P50 {late}",
            "p99": f"P99 {late}",
            **dlpm.PROGRAM_TIMES,
            "hit_rate": "Hit rate",
            "imbalance": "Prompt tokens computed by the busiest replica over the mean",
            "difference": DIFFERENCE,
        }.items():
            yield Table(
                what, head, [grid.row(point.setting, point, CONTENDERS, field) for point in grid.points]
            )


def _load(what: str, number: int, full: bool) -> tuple[TrafficSpec, Plan]:
    if what != PAUSES:
        return placement.load(what, number, quick=not full)
    names = [f"client {k}" for k in range(4)]
    shape = conversations(placement.SYSTEM_TOKENS, LONG_TURNS) | {"think_s": THINK_S}
    plan = dlpm.plan(300.0 if full else 60.0)
    at_once = {name: EACH * number // len(names) for name in names}
    return traffic("chat", *(sender(name, shape, 1.0) for name in names)), replace(plan, at_once=at_once)


def _site(what: str, number: int, contender: Scheduler) -> Site:
    site = placement.site_of(what, number, contender)
    return replace(site, kv_tokens=POOL_TOKENS) if what == PAUSES else site


class _Grid(dlpm.Grid):
    def over(self, name: str, point: Point, what: str, other: float) -> float:
        return self.number(point, name, what) / other

    def best(self, point: Point) -> float:
        return max(self.number(point, name, "rate") for name in CONTENDERS)

    def ratios(self, name: str, what: str) -> dict[Point, float]:
        """Over the default's, by point."""
        return {at: self.over(name, at, what, self.number(at, DEFAULT, what)) for at in self.points}

    def is_better(self, name: str) -> bool:
        rates, late = self.ratios(name, "rate").values(), self.ratios(name, "p99").values()
        return min(rates) >= ENOUGH and fmean(late) <= AHEAD and max(late) <= 1.02

    def words(self, name: str) -> str:
        late = self.ratios(name, "p99")
        at = min(late, key=lambda point: late[point])
        return f"(P99 {late[at]:.2f}× at {at.setting}, elsewhere at most {max(late.values()):.2f}×)"

    def cells(self, name: str) -> list[str]:
        """Throughput, P99 and program time of the verdict."""
        found = []
        for what in ("rate", "p99", "program_mean_s"):
            ratios = self.ratios(name, what).values()
            found.append(f"{fmean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
        return found
