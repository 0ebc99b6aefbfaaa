"""DLPM, Figure 12: four clients with different programs on one A10G."""

from collections.abc import Mapping, Sequence

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import SEEDS, Cell, Json, Result, Size, TrafficSpec, by_label
from workloads.experiments.curves import largest
from workloads.experiments.program_senders import CHAT, judge, sender, tot
from workloads.experiments.senders import traffic
from workloads.records import Run

CHATS, TREES, JUDGES = ("chat 0", "chat 1"), "tot", "judge"
CHAT_PART, TREE_PART, JUDGE_PART = 0.1, 1.0, 0.4
"""Of what the GPU does of such programs alone: 1.6 together."""
DIMENSIONS = 2
LENGTH_S, WINDOW_S = 240.0, 60.0


def mixed() -> TrafficSpec:
    """Two clients with conversations, one with trees, one with judgements."""
    return traffic(
        "mixed",
        *(sender(name, CHAT, dlpm.CHAT.rate_per_s(CHAT_PART)) for name in CHATS),
        sender(TREES, tot(3), dlpm.TOT3.rate_per_s(TREE_PART), well_behaved=False),
        sender(JUDGES, judge(DIMENSIONS), dlpm.JUDGE.rate_per_s(JUDGE_PART)),
    )


class Figure12(dlpm.A10GExperiment):
    id = "dlpm-fig12"

    def cells(self, size: Size) -> Sequence[Cell]:
        length_s, seeds = (LENGTH_S, SEEDS) if size == "full" else (40.0, SEEDS[:1])
        return [
            Cell(
                policy,
                dlpm.a10g("rr", policy=policy, quantum=dlpm.JUDGE.charged),
                mixed(),
                dlpm.plan(length_s, drain_s=None),
                seeds,
                label,
            )
            for policy, label in dlpm.POLICIES.items()
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return dlpm.observe_curves(run, window_s=WINDOW_S)

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        return {
            "waits": {
                name: max(largest(result.curve("response_s", one)) for one in (*CHATS, JUDGES))
                for name, result in results.items()
            }
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        return {"time": dlpm.over_time(by_label(results), (10.0, 5.0), ("response_s", "actual"))}
