"""How long interactive requests wait behind a batch, with and without eviction."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from workloads.deadlines.measures import measure, percentile
from workloads.deadlines.run import Outcome
from workloads.deadlines.traffic import Stream
from workloads.experiments.contract import Cell, Json, Result, Size
from workloads.experiments.qlm_setting import ONE_MODEL, Deadlines, cell, qlm, rule, without_eviction
from workloads.simulation import Site

BATCH = 300
CHATS = 80
CHATS_PER_S = 1.0
BEGIN_S = 10.0
LONG = 4.0
"""Answers of the batch in multiples of ShareGPT's."""
MODEL = next(iter(ONE_MODEL))
SLO_S = 5.0
RESERVES = 0.5
"""So much that no answer finds memory missing."""
QLM = qlm(1, new_token_ratio=RESERVES)
WITHOUT = without_eviction(QLM)
HOW: Mapping[str, tuple[str, Site]] = {
    "eviction": ("with eviction", QLM),
    "rule": ("with eviction, deadline", rule(QLM)),
    "none": ("without eviction", WITHOUT),
    "fcfs": ("in order of arrival", replace(WITHOUT, policy="fcfs", policy_options="")),
}


class Blocking(Deadlines):
    id = "qlm-fig4"

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        found = []
        for outputs in (1.0, LONG) if full else (LONG,):
            streams = [
                Stream(MODEL, "batch-2", 1e4, count=BATCH if full else 80, outputs=outputs),
                Stream(
                    MODEL,
                    "interactive",
                    CHATS_PER_S,
                    from_s=BEGIN_S,
                    count=CHATS if full else 10,
                    slo_s=SLO_S,
                ),
            ]
            for name, (label, site) in HOW.items():
                title = label + (", long answers" if outputs > 1 else "")
                found.append(
                    cell(f"{name}{'.long' if outputs > 1 else ''}", site, streams, most=None, label=title)
                )
        return found

    def measure(self, cell: Cell, outcome: Outcome) -> Mapping[str, Json]:
        """Waiting is until the first token, less the time of a prefill alone: `alone_s` of the replica's model."""
        chats = [one for one in outcome.served if one.asked.slo_class == "interactive"]
        waits = []
        for one in chats:
            replica = outcome.replicas[0]
            alone_s = replica.cost.prefill_s([(one.asked.prompt_tokens, 0)])
            waits.append(max(1e-3, (one.ttft_s or 0.0) - alone_s))
        return {
            **measure(outcome),
            "wait_p50_s": percentile(waits, 0.5),
            "wait_p99_s": percentile(waits, 0.99),
            "wait_mean_s": sum(waits) / len(waits),
        }

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        def times(other: str, what: str) -> float:
            return results[f"{other}.long"].number(what) / results["eviction.long"].number(what)

        return {
            "wait_ratio_eviction": times("none", "wait_mean_s"),
            "wait_ratio_fcfs": times("fcfs", "wait_mean_s"),
            "with_s": results["eviction.long"].number("wait_mean_s"),
            "without_s": results["none.long"].number("wait_mean_s"),
        }
