"""The default beside what it was, stock SGLang, and rules that others have published, in settings of
`beyond-placement`: what is worth taking?"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from workloads.experiments import beyond_placement as placement
from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Part, Table, at_least, graded, plain
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
PER_S = 0.6
"""Conversations that begin at each GPU: about a hundred are under way."""
TAIL_TOKENS = 1024
"""Of a conversation, which are computed in a tenth of a second."""

DEFAULT, UNSHARED = "default", "unshared"
STOCK = ("stock", "stock-mixed")
_OURS: Json = dlpm.SHIPPED.fields
_QUEUES: Json = {"placement": _OURS["placement"]}


class Rival(NamedTuple):
    """Another rule."""

    scheduler: Scheduler
    is_fair: bool
    why: str
    """It is not the default."""


_UNSHARED = "Nobody has a share: the bad client's requests come first while they are cached."
_STOCK: Json = {"placement": "cache_aware", "policy": "fcfs"}
RIVALS: Mapping[str, Rival] = {
    "alternating": Rival(
        Scheduler("the default of before", _OURS | {"mixed_chunk": False, "policy_options": ""}),
        True,
        """Steps for prompts and for those that run take turns, and a step for prompts gives nobody a token; who has no
        credit waits although nobody else is there.""",
    ),
    "prompts-first": Rival(
        placement.CONTENDERS[placement.OURS]._replace(label="prompts first"),
        True,
        "Whoever sends prompts stops all that run, so programs take longer, most of all beside a flood.",
    ),
    **{
        name: Rival(placement.CONTENDERS[name], True, why)
        for name, why in {
            "d2lpm": "Credit at a worker says what was used, not where the client waits least.",
            "vtc": "No locality.",
        }.items()
    },
    "stock": Rival(Scheduler("stock", _STOCK), False, "First come, first served."),
    "stock-mixed": Rival(Scheduler("stock, mixed", _STOCK | {"mixed_chunk": True}), False, "The same."),
    **{
        name: Rival(placement.CONTENDERS[name], False, _UNSHARED)
        for name in ("preble", "lmetric", "cache-aware")
    },
    "dualmap": Rival(Scheduler("DualMap", {"placement": "dualmap", "policy": "lpm"}), False, _UNSHARED),
    "dualmap-fair": Rival(
        Scheduler("DualMap over DLPM", _OURS | {"placement": "dualmap"}),
        True,
        """Neither candidate need be where the client waits least, or what it shares is cached. Migration would change
        little: in overload both are as busy, and else no first token is late.""",
    ),
    UNSHARED: Rival(Scheduler("the default over LPM", _QUEUES | {"policy": "lpm"}), False, _UNSHARED),
    "klpm": Rival(Scheduler("k-LPM", _QUEUES | {"policy": "klpm"}), False, _UNSHARED),
    "klpm-fair": Rival(
        Scheduler("k-LPM within clients", _OURS | {"policy": "klpm-fair"}),
        True,
        "A client's queue at one replica is seldom so long that its order matters; then either may be ahead.",
    ),
    "justitia": Rival(
        Scheduler("Justitia within clients", _OURS | {"policy": "justitia"}),
        True,
        """It needs to know which requests are of one program, and gives those who say it a lower P99 (not of
        documents), at an equal mean; others gain nothing.""",
    ),
    "tail-lru": Rival(
        Scheduler("T-LRU", _OURS | {"tail_tokens": TAIL_TOKENS}),
        True,
        """SGLang has it: `--radix-eviction-policy tlru`. Its thresholds depend on GPU, model and conversations. It
        changes nothing without pauses, or with room in the cache, and little with both short.""",
    ),
}
CONTENDERS: Mapping[str, Scheduler] = {
    DEFAULT: Scheduler("the default", _OURS),
    **{name: rival.scheduler for name, rival in RIVALS.items()},
}

PROMPTS_FIRST = tuple(
    name
    for name, one in CONTENDERS.items()
    if not (one.fields.get("stall_ms") or one.fields.get("mixed_chunk"))
)

ENOUGH, AHEAD = 0.99, 0.95
"""A rule is better than the default where it has so much of its throughput at all points, and so much of its P99 in the
mean and nowhere more than all of it."""


class Frontier(placement.Contest):
    id = "beyond-frontier"
    title = "The default, what it was, stock and rivals on the same work"
    source = "beyond the papers; arXiv 2602.06502, 2502.04677, 2510.17015, 2510.15152, 2605.00528"
    bounds_steps = False
    about = f"""What `sglang-fair cluster` runs by default, beside its steps and options of before (steps for prompts
        and for those that run in turn, no borrowing), itself with prompts first, stock SGLang (FCFS behind cache_aware,
        with and without `--enable-mixed-chunk`), D2LPM and VTC, Preble, LMetric and cache_aware over LPM, and DualMap,
        k-LPM, Justitia's order of programs and Tail-Optimized LRU, each as small as its paper allows
        (`workloads/simulation/rivals.py`). On {GPUS} A100, in settings of `beyond-placement`, and with {PER_S}
        conversations a second for each GPU, of {LONG_TURNS:.0f} turns with {THINK_S:.0f} s between two, in caches of
        {POOL_TOKENS:,} tokens ({PAUSES}). Fair rules that change one part of the default have its other parts;
        all others compute prompts first, unless named mixed. Latencies that were cut off count as the time at which
        they were. Three seeds, medians."""

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
        before, stock = (grid.ratios(name, "rate").values() for name in ("alternating", "stock"))
        most = max(grid.points, key=grid.ratios("stock", "rate").__getitem__)
        sooner = [grid.ratios(name, "program_mean_s").values() for name in ("alternating", *STOCK)]
        found = (
            "; ".join(f"{RIVALS[name].scheduler.label} {grid.words(name)}" for name in better) or "none has"
        )
        unshared = grid.parts(UNSHARED, PROMPTS_FIRST)
        least, where = min((part, point) for point, part in unshared.items())
        slower = [grid.ratios(name, "program_mean_s").values() for name in ("lmetric", "cache-aware")]
        times, rates = [ratio for one in slower for ratio in one], grid.parts(DEFAULT).values()
        none, whole = graded(not better), at_least(least, 0.98, 0.95)
        soon = graded(min(times) > 0.98, fmean(times) > 1)
        more = graded(max(*before, *stock) <= 1, max(fmean(before), fmean(stock)) < 1)
        yield more.claim(f"""What ships serves more than the default of before, and more than stock | | the default of
            before {fmean(before):.3f}× of its throughput in the mean ({min(before):.2f} to {max(before):.2f}), stock
            {fmean(stock):.3f}× ({min(stock):.2f} to {max(stock):.2f}, most in {most.setting}); programs of well-behaved
            clients take {" and ".join(f"{fmean(one):.2f}×" for one in sooner)} as long under the former, stock, and
            stock with mixed steps | In the production mix prefixes are shared little, so nothing is won back that short
            steps cost: prompts first serves as much more as stock does.""")
        yield none.claim(f"""No fair rule of others has the default's throughput everywhere and a lower P99 | |
            {found} | As the table says of each.""")
        yield whole.claim(f"""What the default lacks of the best throughput is what shares cost: over LPM, without
            shares, its placement has it | | of rules with prompts first, at least {least:.3f}× the best
            ({where.setting}), mean {fmean(unshared.values()):.3f}× | No placement is the best in all settings.""")
        yield soon.claim(f"""Tasks of the well-behaved clients take least time under the default | SAGA: 1/1.64 of the
            time, at 0.7 of the throughput | under LMetric and cache_aware {fmean(times):.2f}× as long in the mean,
            {min(times):.2f}× to {max(times):.2f}×, at {fmean(rates):.3f} of the best throughput, at least
            {min(rates):.3f} | Where nothing waits all rules' tasks take equally long.""")
        yield Table(
            "Over the default's numbers, mean over settings (least to most)",
            "rule | throughput | P50 | P99 | program time | shares | why it is not the default",
            [
                [rival.scheduler.label, *grid.cells(name), "yes" if rival.is_fair else "no", plain(rival.why)]
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
    shape = conversations(placement.SYSTEM_TOKENS, LONG_TURNS) | {"think_s": THINK_S}
    sent = traffic("chat", *(sender(f"client {k}", shape, PER_S * number / 4) for k in range(4)))
    return sent, dlpm.plan(400.0 if full else 60.0)


def _site(what: str, number: int, contender: Scheduler) -> Site:
    site = placement.site_of(what, number, contender)
    return replace(site, kv_tokens=POOL_TOKENS) if what == PAUSES else site


class _Grid(dlpm.Grid):
    def parts(self, name: str, among: Iterable[str] = tuple(CONTENDERS)) -> dict[Point, float]:
        """Throughput over the best of these."""
        best = {at: max(self.number(at, one, "rate") for one in among) for at in self.points}
        return {at: self.number(at, name, "rate") / best[at] for at in self.points}

    def ratios(self, name: str, what: str) -> dict[Point, float]:
        """Over the default's, by point."""
        return {at: self.number(at, name, what) / self.number(at, DEFAULT, what) for at in self.points}

    def is_better(self, name: str) -> bool:
        rates, late = self.ratios(name, "rate").values(), self.ratios(name, "p99").values()
        return min(rates) >= ENOUGH and fmean(late) <= AHEAD and max(late) <= 1.02

    def words(self, name: str) -> str:
        late = self.ratios(name, "p99")
        at = min(late, key=lambda point: late[point])
        return f"(P99 {late[at]:.2f}× at {at.setting}, elsewhere at most {max(late.values()):.2f}×)"

    def cells(self, name: str) -> list[str]:
        """Throughput, P50, P99 and program time."""
        found = []
        for what in ("rate", "p50", "p99", "program_mean_s"):
            ratios = self.ratios(name, what).values()
            found.append(f"{fmean(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})")
        return found
