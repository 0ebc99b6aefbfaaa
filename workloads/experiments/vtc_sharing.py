"""VTC, Figures 4, 5, 6 and 9: clients that ask for less than their share, now and then, or more and more."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from workloads.experiments import vtc_setting as vtc
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    Traffic,
    verdict,
)
from workloads.experiments.curves import Line, average, variation
from workloads.experiments.senders import FromSenders, even, on_off, sender, traffic
from workloads.records import Run


class _OneRun(FromSenders):
    """One cell, VTC on one traffic, and the paper's two panels: service rate and response time."""

    def traffic(self, length_s: float) -> Traffic:
        raise NotImplementedError

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (600.0, ("0", "1", "2")) if size == "full" else (300.0, ("0",))
        return [Cell("vtc", vtc.site("vtc"), self.traffic(length_s), vtc.plan(length_s), seeds)]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return vtc.observe(run)

    def panels(self, result: Result) -> Figure:
        return Figure(
            "service",
            "Received service rate in 60 s windows (left) and response time of the requests sent in them (right), VTC.",
            vtc.rates_and_responses(result),
            (8.4, 3.4),
        )


class BelowShare(_OneRun):
    id = "vtc-fig4"
    title = "Two clients below their share, one overloaded"
    source = "VTC, Figure 4"
    about = "15, 30 and 90 requests/min of 256 + 256 tokens, evenly spaced; the third is backlogged."

    def traffic(self, length_s: float) -> Traffic:
        rates = (15, 30, 90)
        return traffic(
            "below-share",
            *(sender(f"client {k}", even(rpm), 256, 256) for k, rpm in enumerate(rates, start=1)),
        )

    def report(self, results: Mapping[str, Result]) -> Report:
        run = results["vtc"]
        ratio = vtc.ratio_of_service(run, "client 2", "client 1")
        total = sum(run.number(f"clients/client {k}/service") for k in (1, 2, 3))
        share = run.number("clients/client 3/service") / total
        slowest = max(run.number(f"clients/client {k}/response_s/p90") for k in (1, 2))
        line = run.curve("response_s", "client 3")
        early, late = (average(line, *part(run)) for part in (_first_third, _last_third))
        return Report(
            claims=[
                Claim(
                    "Clients below their share are served as they ask",
                    "services 1 : 2",
                    f"1 : {ratio:.2f}",
                    verdict(1.9 <= ratio <= 2.1),
                ),
                Claim(
                    "They are served at once",
                    "immediately",
                    f"P90 of the response time {slowest:.2f} s",
                    verdict(slowest <= 5.0, partly=slowest <= 10.0),
                    "A request waits for the next one to finish when the pool is full.",
                ),
                Claim(
                    "The overloaded client takes the rest (work conservation)",
                    "more than 1/3",
                    f"{share:.0%} of the service",
                    verdict(share > 1 / 3),
                ),
                Claim(
                    "The overloaded client's response time rises",
                    "rises all the time",
                    f"from {early:.0f} s in the first third to {late:.0f} s in the last",
                    verdict(late > 1.5 * early),
                ),
            ],
            figures=[self.panels(run)],
        )


class OnOff(_OneRun):
    id = "vtc-fig5"
    title = "A client below its share that comes and goes"
    source = "VTC, Figure 5"
    about = "Client 1 sends 30 requests/min every other minute, client 2 120 requests/min all the time."

    def traffic(self, length_s: float) -> Traffic:
        return traffic(
            "on-off", sender("client 1", on_off(30), 256, 256), sender("client 2", even(120), 256, 256)
        )

    def report(self, results: Mapping[str, Result]) -> Report:
        run = results["vtc"]
        varies = variation(vtc.total_rate(run), 60.0)
        off = [average(self._share(run), (a + b) / 2 - 1, (a + b) / 2 + 1) for a, b in self._off(run)]
        quick, slow = (run.number(f"clients/client {k}/response_s/mean") for k in (1, 2))
        return Report(
            claims=[
                Claim(
                    "The total service rate stays the same",
                    "constant",
                    f"varies by {varies:.1%} (standard deviation over mean)",
                    verdict(varies <= 0.05, partly=varies <= 0.1),
                ),
                Claim(
                    "In OFF phases the other takes all",
                    "all of it",
                    f"{fmean(off):.0%} in the windows of OFF phases",
                    verdict(fmean(off) >= 0.85, partly=fmean(off) >= 0.7),
                    "What client 1 sent at the end of an ON phase is still being answered.",
                ),
                Claim(
                    "The client below its share is served fast",
                    "low latency",
                    f"{quick:.1f} s in the mean, the other {slow:.0f} s",
                    verdict(quick <= 5.0 and quick < slow / 5, partly=quick < slow / 2),
                ),
            ],
            figures=[self.panels(run)],
        )

    @staticmethod
    def _off(run: Result) -> list[tuple[float, float]]:
        return vtc.phases_of(run.cell.plan.duration_s - 60.0, 60.0, 60.0)

    @staticmethod
    def _share(run: Result) -> Line:
        """Client 2's part of the total at each time."""
        (times, total), (_, mine) = vtc.total_rate(run), run.curve("rate", "client 2")
        parts = zip(mine, total, strict=True)
        return times, [None if one is None or not every else one / every for one, every in parts]


class OnOffOverload(_OneRun):
    id = "vtc-fig6"
    title = "A client above its share that comes and goes"
    source = "VTC, Figure 6"
    about = (
        "Client 1 sends 120 requests/min every other minute, client 2 180 requests/min all the time. Client 1 never "
        "catches up in its OFF phases, so it is backlogged all the time."
    )

    def traffic(self, length_s: float) -> Traffic:
        return traffic(
            "on-off-overload",
            sender("client 1", on_off(120), 256, 256),
            sender("client 2", even(180), 256, 256),
        )

    def report(self, results: Mapping[str, Result]) -> Report:
        run = results["vtc"]
        gap, ratio = (
            vtc.largest_gap(run, "client 1", "client 2"),
            vtc.ratio_of_service(run, "client 2", "client 1"),
        )
        return Report(
            claims=[
                Claim(
                    "A client that stays backlogged in its OFF phases receives as much as the other",
                    "equal rates in all phases",
                    f"1 : {ratio:.2f}; in 60 s windows within {gap:.0%}",
                    verdict(1 / 1.05 <= ratio <= 1.05 and gap <= 0.15, partly=1 / 1.2 <= ratio <= 1.2),
                    "Where client 1's backlog is served before its next ON phase, the other takes the rest.",
                )
            ],
            figures=[self.panels(run)],
        )


class Isolation(_OneRun):
    id = "vtc-fig9"
    title = "One client sends more and more"
    source = "VTC, Figure 9"
    about = "Client 1 sends 30 requests/min; client 2's rate rises in a straight line from 12 to 120 requests/min."

    def traffic(self, length_s: float) -> Traffic:
        ramp = {"kind": "ramp", "rpm": 12, "to_rpm": 120, "over_s": length_s}
        return traffic("ramp", sender("client 1", even(30), 256, 256), sender("client 2", ramp, 256, 256))

    def report(self, results: Mapping[str, Result]) -> Report:
        run = results["vtc"]
        line = run.curve("response_s", "client 1")
        before, after = (average(line, *part(run)) for part in (_first_third, _last_third))
        other = average(run.curve("response_s", "client 2"), *_last_third(run))
        return Report(
            claims=[
                Claim(
                    "The well-behaved client's response time is about the same, however much the other sends",
                    "roughly unchanged",
                    f"{before:.2f} s in the first third, {after:.2f} s in the last; the other's {other:.0f} s then",
                    verdict(after <= 5.0 and after < other / 3, partly=after < other / 2),
                    "Once the pool is full, a request waits for another to finish, here a second or two.",
                )
            ],
            figures=[self.panels(run)],
        )


def _first_third(run: Result) -> tuple[float, float]:
    return 0.0, run.cell.plan.duration_s / 3


def _last_third(run: Result) -> tuple[float, float]:
    return run.cell.plan.duration_s * 2 / 3, run.cell.plan.duration_s
