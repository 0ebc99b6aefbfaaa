"""From the records of runs to the numbers of a row. Everything is a ratio of two runs of the same load.

n is the number of clients that are active in a run. Only what happens in the *span* counts: from the end of the warm-up
to the end of arrivals.

    victim_share_of_gps    n times the victim's output tokens a second, over what it has when it is alone. Under
                           generalized processor sharing (GPS) a client has the engine for at least 1/n of the time, so
                           this is at least 1; it is more where clients share steps, up to n. The least of all victims
    slowdown_over_n        mean time of a light client's programs, over n times their mean time when there are only
                           light clients. At most 1 under GPS. The largest of all light clients. Programs that began in
                           the span; one that the run's end cut off counts with the time it had taken
    ttft_p99_over_solo     P99 (nearest rank) of the time to first token of the light clients' requests, over the same
                           when there are only light clients. Time counts from when a request was due
    throughput_over_stock  tokens a second of all clients, prompts and answers, over stock's in the same scene. A prompt
                           counts when its first token comes, cached or not

With repeats each ratio is taken within a repeat, whose runs have the same seed, and the row has their median. None:
this row has no such clients, or nothing of theirs was answered.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nextafter
from operator import truediv
from statistics import mean, median
from typing import TypeAlias

from sglang_fair.core.cost import Linear
from sglang_fair.settings.table import STOCK_PREFIX
from workloads.isolation.attacks import LIGHT, VICTIM, Scene
from workloads.measures import TOKENS
from workloads.records import Run
from workloads.table import Percentile, Requests, latencies
from workloads.windows import Windows

OURS, STOCK = "ours", "stock"
OUTPUT = Linear(0.0, 1.0)
"""The cost function that counts output tokens."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A scheduler and what stands before it."""

    name: str
    """`OURS` or `STOCK`."""
    placement: str
    policy: str

    @property
    def title(self) -> str:
        return f"{self.name}: {self.placement}+{self.policy}"


@dataclass(frozen=True, slots=True)
class Observed:
    """What counts of one run, in seconds of the engine."""

    tokens_per_s: float
    victim_tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Output tokens a second, by victim."""
    program_s: Mapping[str, float] = field(default_factory=dict)
    """Mean time of a program, by light client."""
    ttft_p99_s: float | None = None
    programs: int = 0
    """Of light clients, begun in the span."""
    cut_off: int = 0
    """Of those: not ended when the run ended."""
    failed: int = 0
    """Requests, of anybody."""


@dataclass(frozen=True, slots=True)
class IsolationRow:
    """One stack under one attack, with n clients. The first eight fields are those that the module defines."""

    stack: str
    policy: str
    attack: str
    clients: int
    victim_share_of_gps: float | None
    slowdown_over_n: float | None
    ttft_p99_over_solo: float | None
    throughput_over_stock: float | None
    placement: str
    tokens_per_s: float | None
    program_s: float | None
    """Of the light client that fares worst."""
    ttft_p99_s: float | None
    programs: int
    cut_off: int
    failed: int


def observe(run: Run, warm_up_s: float, pace: float = 1.0) -> Observed:
    """The measures of one run, in seconds of the engine, of which each took `pace` seconds in the run and its warm-up.

    Raises ValueError if the run was cut off, or ended within its warm-up.
    """
    if run.end is None:
        raise ValueError("the run was cut off: it has no end")
    end_s = min(run.manifest.duration_s, run.end.t_s)
    if end_s <= warm_up_s:
        raise ValueError(f"the run ended within its warm-up of {warm_up_s:g} s")
    table, span_s = Requests(run), (end_s - warm_up_s) / pace
    tokens = Windows(table, cost=TOKENS).service(warm_up_s, nextafter(end_s, inf))
    answers = Windows(table, cost=OUTPUT).service(warm_up_s, end_s)
    if None in tokens.values():
        raise ValueError("a request has no count of its prompt's tokens")
    in_span = table.sent_in(warm_up_s, end_s)
    light = [name for name in table.clients if name.startswith(LIGHT)]
    programs = {
        name: latencies(
            (p for p in run.programs if p.client == name and warm_up_s <= p.t_intended_s < end_s), run.end.t_s
        )
        for name in light
    }
    firsts = [one for name in light for one in table.ttfts(table.of[name] & in_span)]
    p99 = Percentile.of(firsts, 99)
    return Observed(
        tokens_per_s=sum(units or 0.0 for units in tokens.values()) / span_s,
        victim_tokens_per_s={
            name: (answers[name] or 0.0) / span_s for name in table.clients if name.startswith(VICTIM)
        },
        program_s={
            name: mean(time_s for time_s, _ in found) / pace for name, found in programs.items() if found
        },
        ttft_p99_s=None if p99 is None else p99.value_s / pace,
        programs=sum(map(len, programs.values())),
        cut_off=sum(cut for found in programs.values() for _, cut in found),
        failed=int(table.failed.sum()),
    )


Runs: TypeAlias = Mapping[tuple[Stack, Scene], Sequence[Observed]]
"""Every run, by stack and scene: one for each repeat."""


def rows(runs: Runs) -> list[IsolationRow]:
    """For each stack and attack a row with the attacker alone, and one for each number of clients beside it."""
    groups: dict[tuple[Stack, str, int], list[Scene]] = {}
    for stack, scene in runs:
        if scene.attack is not None:
            groups.setdefault((stack, scene.attack, scene.clients), []).append(scene)
    return [_row(runs, *group, scenes) for group, scenes in groups.items()]


def _row(runs: Runs, stack: Stack, attack: str, n: int, scenes: Sequence[Scene]) -> IsolationRow:
    victim = next((scene for scene in scenes if scene.victim), None)
    other = next((scene for scene in scenes if not scene.victim), None)
    seen = runs[stack, other] if other else ()
    solo = runs[stack, Scene(light=other.light)] if other and other.light else ()
    stock = next((found for (by, scene), found in runs.items() if (by.name, scene) == (STOCK, other)), ())
    return IsolationRow(
        stack=stack.name,
        policy=stack.policy.removeprefix(STOCK_PREFIX),
        attack=attack,
        clients=n,
        victim_share_of_gps=None
        if victim is None
        else _ratio(
            runs[stack, victim],
            runs[stack, Scene(victim=True)],
            lambda one: one.victim_tokens_per_s,
            lambda rate, alone: n * rate / alone,
            min,
        ),
        slowdown_over_n=_ratio(
            seen, solo, lambda one: one.program_s, lambda time_s, alone_s: time_s / (n * alone_s)
        ),
        ttft_p99_over_solo=_ratio(seen, solo, lambda one: {"": one.ttft_p99_s}),
        throughput_over_stock=_ratio(seen, stock, lambda one: {"": one.tokens_per_s}),
        placement=stack.placement,
        tokens_per_s=_median(one.tokens_per_s for one in seen),
        program_s=_median(max(one.program_s.values(), default=None) for one in seen),
        ttft_p99_s=_median(one.ttft_p99_s for one in seen),
        programs=sum(one.programs for one in seen),
        cut_off=sum(one.cut_off for one in seen),
        failed=sum(one.failed for scene in scenes for one in runs[stack, scene]),
    )


def _ratio(
    runs: Sequence[Observed],
    others: Sequence[Observed],
    values: Callable[[Observed], Mapping[str, float | None]],
    over: Callable[[float, float], float] = truediv,
    worst: Callable[..., float | None] = max,
) -> float | None:
    """What `runs` have over what the `others` of the same repeats have; of several clients the worst counts."""
    return _median(
        worst(
            (
                over(value, base)
                for name, value in values(one).items()
                if value is not None and (base := values(other).get(name))
            ),
            default=None,
        )
        for one, other in zip(runs, others, strict=False)
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{median(known):.4g}") if known else None
