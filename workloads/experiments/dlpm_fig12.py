"""DLPM, Figure 12: four clients with different programs on one A10G."""

from collections.abc import Mapping, Sequence

from workloads.experiments import dlpm_setting as dlpm
from workloads.experiments.contract import (
    Cell,
    Claim,
    Figure,
    Json,
    Report,
    Result,
    Size,
    Traffic,
    medians,
    verdict,
)
from workloads.experiments.curves import largest
from workloads.experiments.program_senders import CHAT, judge, sender, tot
from workloads.experiments.senders import FromSenders, traffic
from workloads.records import Run

POLICIES = {"dlpm": "DLPM", "lpm": "LPM", "vtc": "VTC"}
CHATS, TREES, JUDGES = ("chat 0", "chat 1"), "tot", "judge"
CHAT_PART, TREE_PART, JUDGE_PART = 0.1, 1.0, 0.4
"""Of what the GPU does of such programs alone: 1.6 together."""


def mixed() -> Traffic:
    """Two clients with conversations, one with trees, one with judgements."""
    return traffic(
        "mixed",
        *(sender(name, CHAT, dlpm.CHAT.rate_per_s(CHAT_PART)) for name in CHATS),
        sender(TREES, tot(3), dlpm.TOT3.rate_per_s(TREE_PART), well_behaved=False),
        sender(JUDGES, judge(2), dlpm.JUDGE.rate_per_s(JUDGE_PART)),
    )


class Figure12(FromSenders):
    id = "dlpm-fig12"
    title = "Four clients with different programs"
    source = "DLPM, Figure 12"
    about = (
        "Llama-3.2-3B on one A10G. Two clients hold conversations, one sends trees of three branches, one judgements "
        "of 2 dimensions (the paper names the trees only): 10 %, 10 %, 100 % and 40 % of what the GPU does of each "
        "alone, for 240 s; then everything is run to its end."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        length_s, seeds = (240.0, ("0", "1", "2")) if full else (40.0, ("0",))
        return [
            Cell(
                policy,
                dlpm.a10g("rr", policy=policy, quantum=dlpm.JUDGE.charged),
                mixed(),
                dlpm.plan(length_s, drain_s=None),
                seeds,
            )
            for policy in POLICIES
        ]

    def measure(self, cell: Cell, run: Run) -> Mapping[str, Json]:
        return dlpm.observe_curves(run)

    def report(self, results: Mapping[str, Result]) -> Report:
        named = {label: results[policy] for policy, label in POLICIES.items()}
        ends = {label: result.number("end_s") for label, result in named.items()}
        others = (*CHATS, JUDGES)
        waits = {
            label: max(largest(result.curve("response_s", one)) for one in others)
            for label, result in named.items()
        }
        even = {label: result.number("jain_actual") for label, result in named.items()}
        return Report(
            claims=[
                Claim(
                    "DLPM finishes everything first",
                    "better than the other schedulers",
                    ", ".join(f"{label} {end:.0f} s" for label, end in ends.items()),
                    verdict(
                        ends["DLPM"] <= 1.01 * min(ends.values()),
                        partly=ends["DLPM"] <= 1.05 * min(ends.values()),
                    ),
                    "LPM keeps every hit; a turn for each client costs some.",
                ),
                Claim(
                    "Under LPM the client with trees keeps the others waiting; not under DLPM",
                    "significantly increased",
                    "longest mean in 60 s of the others: "
                    + ", ".join(f"{label} {wait:.1f} s" for label, wait in waits.items()),
                    verdict(waits["LPM"] >= 2 * waits["DLPM"], partly=waits["LPM"] >= 1.2 * waits["DLPM"]),
                ),
                Claim(
                    "VTC hands out actual service more evenly than DLPM",
                    "more even",
                    f"Jain's index VTC {even['VTC']:.3f}, DLPM {even['DLPM']:.3f}, LPM {even['LPM']:.3f}",
                    verdict(even["VTC"] >= even["DLPM"], partly=even["VTC"] >= 0.97 * even["DLPM"]),
                    "Neither is above the other by more than seeds differ: the light clients get all they ask for.",
                ),
            ],
            tables=[
                medians(
                    "Medians over seeds",
                    "scheduler",
                    {
                        "end, s": "end_s",
                        "tokens/s": "tokens_per_s",
                        "hit rate": "hit_rate",
                        "others' P50, s": "p50_s",
                        "others' P99, s": "p99_s",
                        "Jain, actual": "jain_actual",
                    },
                    named,
                )
            ],
            figures=[
                Figure(
                    "time",
                    "Response time and actual service in 60 s windows, to each scheduler's end.",
                    dlpm.over_time(named, ("response_s", "actual")),
                    (10.0, 5.0),
                )
            ],
        )
