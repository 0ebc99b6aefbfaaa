"""A quantum that follows a target, beside fixed ones, while the load changes its kind."""

from collections.abc import Mapping, Sequence

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
    Table,
    Traffic,
    verdict,
)
from workloads.experiments.program_senders import sender, tot
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run
from workloads.windows import Windows

FIXED = (500, 20_000, 500_000)
TARGET_HIT_RATE, TARGET_GAP = 0.85, 200_000
MOST = 500_000
LOAD = 2.0
PHASES = ("no sharing", "trees", "no sharing again")
SINGLE_PER_S = 9.0
"""Requests of 512 + 256 tokens a second that one A10G completes."""


def shifting(phase_s: float) -> Traffic:
    """Three clients alike and one that wants more: single requests, then trees, then single requests."""
    single = {"kind": "shared", "of": "", "prefix": 256, "input": 256, "output": 256, "requests": 1}
    rate = float(f"{LOAD * SINGLE_PER_S / 5:.4g}")
    trees = float(f"{LOAD * dlpm.TOT2.capacity_per_s / 3:.4g}")
    never = 1e-9
    senders = []
    for k in range(4):
        mine = rate if k < 3 else 2 * rate
        shape = single | {"of": f"client {k}"}
        senders.append(
            sender(f"client {k}", shape, (mine, phase_s), (never, 2 * phase_s), (mine, 3 * phase_s))
        )
        senders.append(
            sender(
                f"trees {k}",
                tot(2 if k < 3 else 4),
                (never, phase_s),
                (trees, 2 * phase_s),
                (never, 3 * phase_s),
            )
        )
    return traffic("shifting", *senders)


class Adaptive(FromSenders):
    id = "beyond-adaptive"
    title = "An adaptive quantum under shifting load"
    version = 2
    source = "beyond the papers; DLPM §7.2 leaves the choice of Q^u to the operator"
    about = (
        "Llama-3.2-3B on one A10G, three phases of 100 s at twice what it does: four clients with single requests "
        "that share nothing, then four with trees of thoughts, then the first four again. Fixed quanta beside "
        "`dlpm-adaptive` with a hit rate of 0.85 and with a gap of 200,000 units as its target."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        phase_s, seeds = (100.0, ("0", "1", "2")) if full else (25.0, ("0",))
        runs: dict[str, tuple[str, float, str]] = {
            f"fixed.{quantum}": ("dlpm", float(quantum), "") for quantum in FIXED
        }
        limits = f"min_quantum=500,max_quantum={MOST}"
        runs["hit-rate"] = ("dlpm-adaptive", 20_000.0, f"target_hit_rate={TARGET_HIT_RATE},{limits}")
        runs["gap"] = ("dlpm-adaptive", 20_000.0, f"target_gap={TARGET_GAP},{limits}")
        return [
            Cell(
                name,
                dlpm.a10g("rr", policy=policy, quantum=quantum, policy_options=options),
                shifting(phase_s),
                dlpm.plan(3 * phase_s),
                seeds,
            )
            for name, (policy, quantum, options) in runs.items()
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        phase_s = cell.plan.duration_s / 3
        seen, actual = Windows(run), Windows(run, side="actual")
        found: dict[str, Json] = {}
        for k, phase in enumerate(PHASES):
            start_s, end_s = k * phase_s, (k + 1) * phase_s
            kind = "trees" if k == 1 else "client"
            served = seen.service(start_s, end_s)
            mine = {
                name: units for name, units in actual.service(start_s, end_s).items() if name.startswith(kind)
            }
            known = [units for units in mine.values() if units is not None]
            found[phase] = {
                "service_rate": sum(units or 0.0 for units in served.values()) / phase_s,
                "difference": max(known) - min(known),
            }
        return {"phases": found}

    def report(self, results: Mapping[str, Result]) -> Report:
        speed = {
            name: {phase: result.number(f"phases/{phase}/service_rate") for phase in PHASES}
            for name, result in results.items()
        }
        gap = {
            name: {phase: result.number(f"phases/{phase}/difference") for phase in PHASES}
            for name, result in results.items()
        }
        fixed = [name for name in results if name.startswith("fixed.")]
        trees, plain = PHASES[1], PHASES[2]
        best = max(speed[name][trees] for name in fixed)
        fairest = min(max(gap[name].values()) for name in fixed)
        kept = {name: speed[name][trees] / best for name in results}
        widest = {name: max(gap[name].values()) for name in results}
        spread = best / min(speed[name][trees] for name in fixed)
        return Report(
            claims=[
                Claim(
                    "Following a hit rate, DLPM has the throughput of the best fixed quantum where prefixes are shared",
                    "our own question",
                    f"{kept['hit-rate']:.2f}× (fixed quanta differ by {spread:.2f}×)",
                    verdict(kept["hit-rate"] >= 0.97, partly=kept["hit-rate"] >= 0.9),
                    "Where nothing is shared the quantum falls towards what one request is charged; when trees come "
                    "it climbs for as long as that pays, by a step a refill.",
                ),
                Claim(
                    "and is about as fair as the smallest fixed one where nothing is shared",
                    "our own question",
                    f"{gap['hit-rate'][plain]:,.0f} units in the last phase, fixed "
                    + ", ".join(f"{int(name[6:]):,}: {gap[name][plain]:,.0f}" for name in fixed),
                    verdict(
                        gap["hit-rate"][plain] <= 1.2 * min(gap[name][plain] for name in fixed),
                        partly=gap["hit-rate"][plain] <= max(gap[name][plain] for name in fixed),
                    ),
                    "Where a larger quantum does not raise the hit rate it falls, but by a fifth at a refill, and with "
                    "large quanta refills are rare: from 20,000 it comes to some 5,000 in a phase.",
                ),
                Claim(
                    "Following a gap, DLPM keeps differences below it in every phase",
                    "our own question",
                    f"at most {widest['gap']:,.0f} of {TARGET_GAP:,} units (fixed: at least {fairest:,.0f}), "
                    f"{kept['gap']:.2f}× the best throughput with trees",
                    verdict(widest["gap"] <= TARGET_GAP),
                    "Clients of a phase do not all wait from its beginning to its end.",
                ),
            ],
            tables=[
                Table(
                    "Medians over seeds: client-side service, units/s, and the difference of actual service, units",
                    (
                        "quantum",
                        *(f"service, {phase}" for phase in PHASES),
                        *(f"difference, {phase}" for phase in PHASES),
                    ),
                    [
                        (
                            _label(name),
                            *(result.shown(f"phases/{phase}/service_rate") for phase in PHASES),
                            *(result.shown(f"phases/{phase}/difference") for phase in PHASES),
                        )
                        for name, result in results.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "phases",
                    "Client-side service and difference of actual service in each phase.",
                    lambda canvas: _draw(canvas, speed, gap),
                    (10.0, 3.6),
                )
            ],
        )


def _label(name: str) -> str:
    if name.startswith("fixed."):
        return f"fixed, {int(name[6:]):,}"
    return f"hit rate of {TARGET_HIT_RATE}" if name == "hit-rate" else f"gap of {TARGET_GAP:,}"


def _draw(
    canvas: object, speed: Mapping[str, Mapping[str, float]], gap: Mapping[str, Mapping[str, float]]
) -> None:
    units = (("service, units/s", speed), ("difference, units", gap))
    for axes, (unit, found) in zip(style.panels(canvas, 2), units, strict=True):  # type: ignore[arg-type]
        for place, (name, values) in enumerate(found.items()):
            axes.bar(
                [k + (place - 2) * 0.16 for k in range(len(PHASES))],
                [values[phase] for phase in PHASES],
                0.15,
                label=_label(name),
                color=style.client_colour(place),
            )
        axes.set_xticks(range(len(PHASES)), list(PHASES))
        axes.set_ylabel(unit)
        axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.6)
        axes.set_axisbelow(True)
        if found is speed:
            axes.legend(fontsize=8)
