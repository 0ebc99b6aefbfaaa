"""VTC, Figures 15a and 15b: how large the difference gets, by size of the pool and by length of requests."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from workloads.experiments import style
from workloads.experiments import vtc_setting as vtc
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    Table,
    verdict,
)
from workloads.experiments.senders import FromSenders, even, sender, traffic
from workloads.records import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

COST_MODEL = f"a100-80g/llama-2-13b:{vtc.STEP_OVERHEAD}"

SETTINGS: Mapping[str, tuple[int, int, int]] = {
    "pool-35k": (35_000, 512, 90),
    "pool-65k": (65_000, 512, 120),
    "length-256": (35_000, 256, 180),
    "length-768": (35_000, 768, 60),
}
"""KV pool, input and output tokens of a request, requests/min of client 1; client 2 sends twice as many."""


class Pools(FromSenders):
    id = "vtc-fig15"
    title = "Larger pools and longer requests leave larger differences"
    source = "VTC, Figures 15a and 15b"
    about = (
        "Llama-2-13b on an A100 80 GB, two overloaded clients, one sending twice as much. (a) pools of 35 000 and "
        "65 000 tokens, 512 + 512; (b) 256 + 256, 512 + 512 and 768 + 768 in 35 000. The engine has 10 ms of overhead "
        "a step, so that all rates overload it as in the paper. Once with some requests of both waiting at the start, "
        "so that requests run in step, as in the paper's engine, which admits every ten decode steps; once as stated."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (180.0, ("0",))
        return [
            Cell(
                f"{name}{start}",
                vtc.site("vtc", cost_model=COST_MODEL, kv_tokens=pool, max_running=1024),
                traffic(
                    name,
                    sender("client 1", even(rpm, waiting), length, length),
                    sender("client 2", even(2 * rpm, waiting), length, length),
                ),
                vtc.plan(length_s),
                seeds,
            )
            for name, (pool, length, rpm) in SETTINGS.items()
            for start, waiting in (("", vtc.IN_STEP), (".spread", 0))
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        most, spread = (
            {name: results[f"{name}{start}"].number("accumulated/max") for name in SETTINGS}
            for start in ("", ".spread")
        )
        both = (most, spread)
        by_pool = [found["pool-65k"] / found["pool-35k"] for found in both]
        by_length = [found["pool-35k"] / found["length-256"] for found in both]
        beyond = [found["length-768"] / found["pool-35k"] for found in both]
        bounds = {name: 2 * max(length, 2 * pool) for name, (pool, length, _) in SETTINGS.items()}
        used = max(max(most[name], spread[name]) / bounds[name] for name in SETTINGS)
        return Report(
            claims=[
                Claim(
                    "15a: a larger pool varies more",
                    "65 000 above 35 000",
                    _in_and_out(by_pool),
                    verdict(min(by_pool) >= 1.2, partly=max(by_pool) >= 1.2),
                ),
                Claim(
                    "15b: longer requests vary more",
                    "512 above 256",
                    _in_and_out(by_length),
                    verdict(min(by_length) >= 1.1, partly=max(by_length) >= 1.1),
                    "One turn of a client is a request, so the difference is a few requests' worth; what is admitted "
                    "at once decides how many.",
                ),
                Claim(
                    "15b: 512 and 768 vary alike",
                    "the same, for the bound is reached",
                    f"{_in_and_out(beyond)}; {used:.0%} of 2U at most",
                    verdict(
                        all(0.75 <= one <= 1.33 for one in beyond),
                        partly=any(0.75 <= one <= 1.33 for one in beyond),
                    ),
                    "One turn of a client is a request, so out of step the difference grows with its length; in step "
                    "it is as many as end together. The theorem's bound, a pool that is all one client's, is far.",
                ),
                Claim(
                    "Differences stay within the theorem",
                    "2U",
                    f"{used:.0%} of 2U at most",
                    verdict(used <= 1),
                ),
            ],
            tables=[
                Table(
                    "Largest difference of accumulated service",
                    (
                        "pool, tokens",
                        "request, tokens",
                        "difference in step, units",
                        "difference out of step, units",
                        "bound 2U, units",
                        "tokens/s",
                    ),
                    [
                        (
                            f"{pool:,}",
                            f"{length} + {length}",
                            results[name].shown("accumulated/max"),
                            results[f"{name}.spread"].shown("accumulated/max"),
                            float(bounds[name]),
                            results[name].shown("tokens_per_s"),
                        )
                        for name, (pool, length, _) in SETTINGS.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "difference",
                    "Difference of accumulated service, VTC, requests in step.",
                    _draw(results),
                    (8.4, 3.4),
                )
            ],
        )


def _in_and_out(ratios: Sequence[float]) -> str:
    return "{:.2f}× in step, {:.2f}× out of step".format(*ratios)


def _draw(results: Mapping[str, Result]) -> "Callable[[Canvas], None]":
    parts = {
        "512 + 512, by pool in tokens": {"35 000": "pool-35k", "65 000": "pool-65k"},
        "pool of 35 000, by length": {
            "256 + 256": "length-256",
            "512 + 512": "pool-35k",
            "768 + 768": "length-768",
        },
    }

    def draw(canvas: "Canvas") -> None:
        for axes, (title, names) in zip(style.panels(canvas, 2), parts.items(), strict=True):
            style.client_lines(
                axes, {name: vtc.accumulated_curve(results[cell]) for name, cell in names.items()}
            )
            style.label(axes, vtc.TIME, "difference of service, units", title)

    return draw
