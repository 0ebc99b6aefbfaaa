"""QLM, Figures 3 and 18: how long a request waits in a long queue, and how well that is known before."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np

from router.placement.qlm.estimate import Ahead, Estimator, r2
from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.queue import FairQueue
from sglang_fair.sim.cost_model import kv_tokens, make_cost_model
from sglang_fair.sim.gpus import GPUS
from sglang_fair.sim.replica import Finished, Progress, Replica, Settings, SimRequest
from sglang_fair.sim.shapes import SHAPES
from workloads.deadlines.traffic import LONGEST_TOKENS, Asked, Stream, requests
from workloads.experiments.claims import Part, Table, at_least, graded
from workloads.experiments.contract import (
    Cell,
    Experiment,
    Json,
    Measured,
    Result,
    Row,
    TrafficSpec,
    medians,
)
from workloads.plots import Figure, Panel
from workloads.session import Plan
from workloads.simulation import Site

ENGINES: Mapping[str, tuple[str, int]] = {
    "a100-80g/vicuna-13b": ("Vicuna-13B, A100", 3_000),
    "a100-80g/llama-2-70b-4bit": ("Llama-70B, A100", 4_000),
    "a100-80g/mistral-7b": ("Mistral-7B, A100", 16_500),
    "a10g/llama-3.1-8b": ("Llama-3.1-8B, A10", 3_000),
}
"""Each with what it is called, and how many requests are queued: four groups and more."""
MOST_RUNNING = 1024
"""More than any of them has memory for."""
WINDOW_S = 5.0
"""The estimator hears what was done in so many seconds at a time: several steps, whatever they are."""
LONG = 8.0
"""Prompts so many times longer."""
SHORT_PART = 0.5
"""A queue is short up to so many batches beyond the one that runs."""
DELTA = 4
GROUPS = (1, 2, 4, 8)
CURVE_POINTS = 60


class Waits(Experiment):
    id = "qlm-fig3-18"
    title = "Waits in a long queue are a line, and known"
    source = "QLM, Figures 3 and 18"
    about = f"""Thousands of requests with lengths like ShareGPT's come at once to one replica, which serves them in
        order of arrival; a second queue has prompts {LONG:.0f} times as long. The estimator has seen another such
        queue drain. Its R² is over the requests of so many groups, each of {DELTA} average batches."""
    bounds_steps = False
    seeds = ("0",)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        for engine, (called, most) in list(ENGINES.items())[: None if full else 1]:
            for prompts in (1.0, LONG):
                queued = (most if prompts == 1.0 else most // 3) if full else 400
                name = engine.replace("/", ".") + (".long" if prompts > 1 else "")
                arguments = {"engine": engine, "prompts": prompts, "queued": queued}
                label = called + (", long prompts" if prompts > 1 else "")
                yield Row(name, Site(), TrafficSpec("queue", arguments), label, Plan(100.0))

    def run(self, cell: Cell, seed: str) -> Measured:
        told = cell.traffic.arguments
        learnt, made = (_Queue(told, f"{seed} {what}") for what in ("learnt from", "predicted"))
        return Measured(_measure(learnt, made), learnt.end_s + made.end_s)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        usual, long = (
            [one for name, one in at.items() if (".long" in name) == is_long] for is_long in (False, True)
        )
        line, known, literal, over = (
            min(one[path] for one in usual)
            for path in ("r2_line", "groups/4/r2", "groups/4/r2_literal", "over_estimated_short")
        )
        known_long = min(one["groups/4/r2"] for one in long)
        yield at_least(line, 0.99, 0.95).claim(f"""The wait grows linearly with the place in the queue | R²
            0.99 | R² at least {line:.4f}, of those who do not fit at once | Prompts take their part of the
            time, and their lengths vary.""")
        yield at_least(known, 0.99, 0.95).claim(f"""Waits are known before, with four groups in the queue | R²
            0.99 | R² at least {known:.4f}; the paper's equations {literal:.4f} | What a request waits for is
            prompts as well as answers, and the expected answers of those in front differ from what they
            write.""")
        yield at_least(known_long, 0.95, 0.9).claim(f"""So it is with prompts many times as long | prompts are
            taken for constant | R² at least {known_long:.4f} | Fewer requests fit into a batch, so four
            groups are fewer requests, and attention's square is not in a line.""")
        yield graded(over >= 0.9).claim(f"""In a short queue the time to the end is over-estimated |
            conservative | {over:.1%} of requests, by the paper's equations""")
        head = "engine | groups | requests | R² | R², paper's equations"
        lines = [
            [
                one.cell.title,
                groups,
                *(one.shown(f"groups/{groups}/{what}") for what in ("queued", "r2", "r2_literal")),
            ]
            for one in at.values()
            for groups in GROUPS
        ]
        yield Table("R² by the number of groups in the queue", head, lines)
        columns = """engine | average batch = batch | R² of a line = r2_line |
            over-estimated in a short queue = over_estimated_short"""
        yield medians("Each engine", columns, at.values())
        waited, said = (
            {one.cell.title: (one.first["curve"]["places"], one.first["curve"][what]) for one in usual}
            for what in ("waited_s", "said_s")
        )
        panel = Panel(y="wait, s", x="requests in front", lines=waited, dashed=said)
        caption = "Wait by place in the queue (lines), and as estimated before (dashes)."
        yield Figure("waits", caption, [[panel]])
        yield {
            "r2_line": line,
            "r2_four_groups": known,
            "r2_four_groups_long": known_long,
            "over_estimated_short": over,
        }


class _Queue:
    """Requests that come at once to one replica, in order."""

    def __init__(self, given: Mapping[str, Json], seed: str) -> None:
        gpu, shape = given["engine"].split("/")
        stream = Stream("m", "batch-2", 1.0, count=given["queued"], prompts=given["prompts"])
        self.asked: list[Asked] = requests([stream], seed)
        self.kv_tokens = kv_tokens(GPUS[gpu], SHAPES[shape])
        settings = Settings(self.kv_tokens, max_running=MOST_RUNNING, ignore_eos=False, new_token_ratio=0.05,
                            least_new_token_ratio=0.02)  # fmt: skip
        replica = Replica(FairQueue(Fcfs()), make_cost_model(given["engine"]), settings, events=False)
        for one in self.asked:
            replica.arrive(SimRequest(one.id, "c", one.tokens, one.output_tokens, LONGEST_TOKENS), 0.0)
        self.first_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        running, meters = list[int](), replica.meters
        self.counts: list[tuple[float, int, int]] = [(0.0, 0, 0)]
        """Seconds, prompt and output tokens so far, while others wait."""
        while (now_s := replica.next_s) < 1e9:
            for event in replica.advance(now_s):
                if isinstance(event, Progress | Finished):
                    self.first_s.setdefault(event.id, event.t_s)
                if isinstance(event, Finished):
                    self.ended_s[event.id] = event.t_s
            if len(replica.queue):
                running.append(sum(1 for _ in replica.queue.running()))
                if now_s - self.counts[-1][0] >= WINDOW_S:
                    self.counts.append((now_s, meters.extend_tokens, meters.output_tokens))
        self.end_s = max(self.ended_s.values())
        self.batch = max(1.0, sum(running) / max(1, len(running)))

    def estimator(self, *, literal: bool = False) -> Estimator:
        made = Estimator(literal=literal)
        for (from_s, *before), (to_s, *after) in pairwise(self.counts):
            made.learn("w", "m", to_s - from_s, after[0] - before[0], after[1] - before[1])
        for one in self.asked:
            if one.output_tokens > 1:
                token_s = (self.ended_s[one.id] - self.first_s[one.id]) / (one.output_tokens - 1)
                made.learn_answer("w", "m", one.output_tokens, token_s)
        return made


def _measure(learnt: _Queue, made: _Queue) -> Mapping[str, Json]:
    outputs = np.array([one.output_tokens for one in learnt.asked])
    mean, variance = float(outputs.mean()), float(outputs.var())
    estimator, literal = learnt.estimator(), learnt.estimator(literal=True)
    ahead, pairs, plain, over = Ahead(), [], [], []
    short = made.batch * (1 + SHORT_PART)
    for place, one in enumerate(made.asked):
        own = one.prompt_tokens + mean
        said = estimator.wait("w", "m", ahead, made.kv_tokens, own)
        wait_s = made.first_s[one.id]
        pairs.append((said.mean_s, wait_s))
        plain.append((literal.wait("w", "m", ahead).mean_s, wait_s))
        if place < short:
            ends_s = literal.wait("w", "m", ahead).mean_s + literal.pace("w", "m").tail_s
            over.append(ends_s >= made.ended_s[one.id])
        prompts = ahead.prompt_tokens + one.prompt_tokens
        ahead = Ahead(prompts, ahead.output_tokens + mean, ahead.output_variance + variance)
    places = np.arange(len(made.asked))
    waits = np.array([wait_s for _, wait_s in pairs])
    waited = places > made.batch
    step = max(1, len(pairs) // CURVE_POINTS)
    sizes = {groups: min(len(pairs), round(groups * DELTA * made.batch)) for groups in GROUPS}
    return {
        "batch": made.batch,
        "r2_line": float(np.corrcoef(places[waited], waits[waited])[0, 1] ** 2),
        "groups": {
            str(groups): {"queued": size, "r2": r2(pairs[:size]), "r2_literal": r2(plain[:size])}
            for groups, size in sizes.items()
        },
        "over_estimated_short": sum(over) / len(over),
        "end_s": made.end_s,
        "curve": {
            "places": places[::step].tolist(),
            "waited_s": [wait_s for _, wait_s in pairs[::step]],
            "said_s": [said_s for said_s, _ in pairs[::step]],
        },
    }
