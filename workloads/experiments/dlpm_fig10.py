"""DLPM, Figure 10: what Q^w, the stretch for which a client may stick to a worker, does to throughput and fairness."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments import style
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    medians,
    verdict,
)
from workloads.experiments.dlpm_fig7_setting import SCHEDULERS, observe
from workloads.experiments.dlpm_fig9 import REPLICAS, trees
from workloads.experiments.senders import FromSenders
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

QUANTA = (2_000, 5_000, 10_000, 20_000, 40_000)
"""Q^w of the paper, units."""
LARGER = (200_000, 1_000_000)
"""One tree here costs 219,000 units, prompts counted in full."""
OTHERS = ("rr", "preble", "vtc", "cache-aware")
SIDES = {"a": "one misbehaving client", "b": "all well-behaved"}


class Figure10(FromSenders):
    id = "dlpm-fig10"
    title = "Q^w: throughput and Jain's index"
    source = "DLPM, Figures 10a and 10b"
    about = (
        "Figure 9's clients on four A10G for 160 s: (a) client 0's questions are ten times as long, (b) all alike. "
        "Q^u is what one tree is charged. Beside the paper's Q^w, 2,000 to 40,000, larger ones: a tree costs 219,000."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        replicas, length_s = (REPLICAS, 160.0) if full else (2, 40.0)
        found = []
        for side in SIDES if full else ("a",):
            sent = trees(replicas, factor=10 if side == "a" else 1)
            seeds = ("0", "1", "2") if full and side == "a" else ("0",)
            for quantum in (*QUANTA, *LARGER) if full else (QUANTA[0], QUANTA[-1]):
                quanta = dlpm.TOT3.quanta | {"worker_quantum": float(quantum)}
                site = dlpm.a10g("d2lpm", replicas, **quanta)
                found.append(Cell(f"{side}.{quantum}", site, sent, dlpm.plan(length_s), seeds))
            for name in OTHERS:
                site = dlpm.a10g(name, replicas, **dlpm.TOT3.quanta)
                found.append(Cell(f"{side}.{name}", site, sent, dlpm.plan(length_s), seeds))
        return found

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        first, last = f"a.{QUANTA[0]}", f"a.{QUANTA[-1]}"
        speed = {name: result.number("tokens_per_s") for name, result in results.items()}
        swept = [name for name in results if name.startswith("a.") and name[2:].isdigit()]
        largest = swept[-1]
        best = max(OTHERS, key=lambda name: (speed[f"a.{name}"], name))
        over = {name: speed[name] / speed[f"a.{best}"] for name in (last, largest)}
        alike = [
            result.number("jain")
            for name, result in results.items()
            if name.startswith("b.") and name[2:].isdigit()
        ]
        gain, more = speed[last] / speed[first], speed[largest] / speed[last]
        before, after = results[first].values("jain"), results[last].values("jain")
        moves = sorted(new - old for old, new in zip(before, after, strict=True))
        claims = [
            Claim(
                "Throughput rises with Q^w, then stays",
                "rises and saturates from 2,000 to 40,000",
                f"{gain:.2f}× from {_quantum(first)} to {_quantum(last)}, {more:.2f}× from there to "
                f"{_quantum(largest)}",
                verdict(gain >= 1.02 and more <= 1.02, partly=gain >= 1.02),
                "It rises on: a tree costs 219,000 units here, so with 40,000 a client still changes workers within "
                "each tree.",
            ),
            Claim(
                "Then it surpasses all other schedulers",
                "surpasses all",
                f"{over[last]:.2f}× {SCHEDULERS[best].label}, the best other, at {_quantum(last)} and "
                f"{over[largest]:.2f}× at {_quantum(largest)}",
                verdict(over[last] >= 1, partly=over[largest] >= 1),
                "Whoever places by prefix and load alone never has to move a client, and keeps more hits.",
            ),
            Claim(
                "Jain's index of the client-side service falls a little as Q^w grows",
                "0.855 to 0.83",
                f"by {median(moves):+.3f} in the median of the seeds ({moves[0]:+.3f} to {moves[-1]:+.3f}); runs with "
                f"other seeds differ by {max(before) - min(before):.3f}",
                verdict(moves[0] >= -0.1 and moves[-1] <= -0.005, partly=-0.1 <= median(moves) <= -0.005),
                "The index moves by less than runs with other seeds differ, and not with every seed downwards.",
            ),
        ]
        if alike:
            claims.append(
                Claim(
                    "Where all behave well, the index is 1 for every Q^w",
                    "consistently 1",
                    f"at least {min(alike):.3f}",
                    verdict(min(alike) >= 0.98, partly=min(alike) >= 0.95),
                    "Few large trees arrive in a run, not the same number of each client's.",
                )
            )
        return Report(
            claims=claims,
            tables=[
                medians(
                    f"({side}) {title}",
                    "Q^w, units, or scheduler",
                    {
                        "tokens/s": "tokens_per_s",
                        "Jain's index": "jain",
                        "of actual service": "jain_actual",
                        "hit rate": "hit_rate",
                        "imbalance": "imbalance",
                    },
                    {
                        SCHEDULERS[name[2:]].label if name[2:] in SCHEDULERS else _quantum(name): result
                        for name, result in results.items()
                        if name.startswith(f"{side}.")
                    },
                )
                for side, title in SIDES.items()
                if f"{side}.rr" in results
            ],
            figures=[
                Figure(
                    "quantum",
                    "Throughput (solid) and Jain's index (dashed) over Q^w; horizontal lines are the other schedulers.",
                    lambda canvas: _draw(canvas, results),
                    (9.0, 3.8),
                )
            ],
        )


def _quantum(name: str) -> str:
    """Of a D2LPM cell, units."""
    return f"{int(name[2:]):,}"


def _draw(canvas: "Canvas", results: Mapping[str, Result]) -> None:
    sides = [side for side in SIDES if f"{side}.rr" in results]
    for axes, side in zip(style.panels(canvas, len(sides), share_y=True), sides, strict=True):
        swept = [name for name in results if name.startswith(f"{side}.") and name[2:].isdigit()]
        quanta = [int(name[2:]) for name in swept]
        axes.semilogx(
            quanta,
            [results[name].number("tokens_per_s") for name in swept],
            "o-",
            color=style.scheduler_colour("D2LPM"),
            label="D2LPM",
        )
        for name in OTHERS:
            label = SCHEDULERS[name].label
            axes.axhline(
                results[f"{side}.{name}"].number("tokens_per_s"),
                color=style.scheduler_colour(label),
                linewidth=1.2,
                label=label,
            )
        style.label(
            axes,
            "Q^w, units",
            "tokens/s" if side == sides[0] else "",
            f"({side}) {SIDES[side]}",
            legend=side == "a",
        )
        index = axes.twinx()
        index.semilogx(
            quanta, [results[name].number("jain") for name in swept], "s--", color="#555555", markersize=4
        )
        index.set_ylim(0, 1.05)
        index.set_ylabel("Jain's index")
