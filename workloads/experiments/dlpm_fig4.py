"""DLPM, Figure 4: what one central DLPM queue costs, measured on our own router and its central placement.

The router of `centralized_dlpm` is the global scheduler. At each batching point of a worker it is told what the
worker's cache gained and lost, and that a request is done; so it matches all that waits against that worker's tree
and hands out the next request. Told apart are

    metadata         CPU time of taking in the cache's changes
    prefix match     CPU time of taking in that a request is done: matching the whole queue, and the choice
    synchronisation  not measured but added up: the router is one thread, so where the D workers' batching points
                     coincide, a worker waits for those before it, on average (D - 1) / 2 times the two above

CPU times are this machine's, of Python; the decode step beside them is the cost model's, of an A100.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import process_time  # CPU time is what is measured here
from typing import TYPE_CHECKING

from router.core import Router
from router.events import Arrive, Done, Place, Removed, Stored
from workloads.driver import Plan
from workloads.experiments import style
from workloads.experiments.contract import (
    Cell,
    Claim,
    Experiment,
    Figure,
    Measured,
    Report,
    Result,
    Size,
    Table,
    Traffic,
    verdict,
)
from workloads.experiments.program_senders import filler_tokens
from workloads.simulation import Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

REPLICAS, QUEUES = (1, 2, 4, 8), (25, 50, 100, 200, 400)
QUEUE, DEGREE = 100, 4
"""What is kept fixed while the other is swept."""
BATCH, STEPS = 25, 10
"""Requests a worker runs, and decode steps between two batching points."""
PREFIX_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 1024, 1184, 256
"""Of a request."""
PREFIXES = 32
"""Requests take turns with so many, so whatever waits has a prefix that some worker holds."""
PARTS = {"metadata": "metadata", "synchronisation": "synchronisation", "match": "prefix match"}
CLIENTS = 8


class Figure4(Experiment):
    id = "dlpm-fig4"
    title = "What a central queue costs"
    source = "DLPM, Figures 4a and 4b"
    about = (
        "CPU time of our own router with the placement `centralized_dlpm`, for each batching point of a worker that "
        "runs 25 requests, of 1,184 tokens, that begin with one of 32 prefixes of 1,024. Our router is one thread "
        "without locks, so synchronisation is what workers wait for each other where their points coincide: (D - 1) / "
        "2 turns of the others on average, which is added up, not measured. For reference: a decode step of "
        "Llama-3.1-8B on an A100 with 25 requests, by the cost model. Times are this machine's."
    )

    def cells(self, size: Size) -> Sequence[Cell]:
        full = size == "full"
        runs = [(degree, QUEUE) for degree in (REPLICAS if full else (1, 4))]
        runs += [(DEGREE, queue) for queue in (QUEUES if full else (25,)) if queue != QUEUE]
        points = 40 if full else 8
        return [
            Cell(
                f"{degree}.{queue}",
                Site(
                    replicas=degree,
                    placement="centralized_dlpm",
                    placement_options={"slots": BATCH},
                ),
                Traffic("queue", {"waiting": queue, "points": points}),
                Plan(1.0),
            )
            for degree, queue in runs
        ]

    def run(self, cell: Cell, seed: str) -> Measured:
        waiting, points = cell.traffic.arguments["waiting"], cell.traffic.arguments["points"]
        measured = _Points(cell.site, waiting, seed)
        metadata_s, match_s = zip(*(measured.point() for _ in range(points)), strict=True)
        one_s = median(metadata_s), median(match_s)
        context = BATCH * (INPUT_TOKENS + OUTPUT_TOKENS // 2)
        found = {
            "metadata_s": one_s[0],
            "match_s": one_s[1],
            "synchronisation_s": (cell.site.replicas - 1) / 2 * sum(one_s),
            "decode_s": cell.site.make_cost_model().decode_s(BATCH, context),
        }
        return Measured(found, 0.0)

    def report(self, results: Mapping[str, Result]) -> Report:
        by_degree = {
            degree: results[f"{degree}.{QUEUE}"] for degree in REPLICAS if f"{degree}.{QUEUE}" in results
        }
        by_queue = {queue: results[f"{DEGREE}.{queue}"] for queue in QUEUES if f"{DEGREE}.{queue}" in results}
        (_, least), *_, (_, most) = by_degree.items()
        (short, few), *_, (long, many) = by_queue.items()
        shares = {degree: _total(result) / result.number("decode_s") for degree, result in by_degree.items()}
        flat = most.number("metadata_s") / least.number("metadata_s")
        matches = [result.number("match_s") for result in by_degree.values()]
        rises = all(later > sooner for sooner, later in pairwise(matches))
        queued = many.number("match_s") / few.number("match_s")
        top = max(shares)
        return Report(
            claims=[
                Claim(
                    "Metadata of one worker costs about the same however many workers there are",
                    "about constant",
                    f"{flat:.2f}× at D = {top}",
                    verdict(flat <= 1.5, partly=flat <= 2.5),
                    "One tree for all workers grows with them.",
                ),
                Claim(
                    "Synchronisation and prefix matching grow with the number of workers",
                    "both grow",
                    f"prefix match {', '.join(f'{1000 * one:.2f}' for one in matches)} ms at D = "
                    f"{', '.join(map(str, by_degree))}; synchronisation, which is added up, to "
                    f"{1000 * most.number('synchronisation_s'):.1f} ms",
                    verdict(rises and matches[-1] >= 1.2 * matches[0], partly=rises),
                    "All workers' trees are one here, walked once a request, so matching does not grow with them. "
                    "That waiting for each other does follows from how it is added up.",
                ),
                Claim(
                    "Prefix matching grows with the queue",
                    "grows",
                    f"{queued:.1f}× from {short} to {long} requests",
                    verdict(queued >= 0.5 * long / short, partly=queued >= 1.5),
                ),
                Claim(
                    f"At D = 8 it is a large part of decoding (queue of {QUEUE})",
                    "about 40 % of a decode step",
                    f"at D = {top} {shares[top]:.0%} of one step, {shares[top] / STEPS:.0%} of the {STEPS} between "
                    "two batching points",
                    verdict(shares[top] >= 0.3, partly=shares[top] >= 0.15),
                    "Our tree goes from page to page of 16 tokens by look-ups, so matching is cheap, and no worker "
                    "has to wait for a lock; with a queue of 400 it is several times as much.",
                ),
            ],
            tables=[
                Table(
                    "For one batching point of one worker, ms (medians)",
                    ("D", "queue", *PARTS.values(), "one decode step"),
                    [
                        (
                            name.split(".")[0],
                            int(name.split(".")[1]),
                            *(1000 * result.number(f"{part}_s") for part in PARTS),
                            1000 * result.number("decode_s"),
                        )
                        for name, result in results.items()
                    ],
                )
            ],
            figures=[
                Figure(
                    "overhead",
                    "The scheduler's time for one batching point; the line is one decode step.",
                    lambda canvas: _draw(canvas, {"workers": by_degree, "queue length": by_queue}),
                    (9.0, 3.6),
                )
            ],
        )


def _total(result: Result) -> float:
    return sum(result.number(f"{part}_s") for part in PARTS)


class _Points:
    """A router whose workers are full and whose queue has a given length at every batching point."""

    def __init__(self, site: Site, waiting: int, seed: str) -> None:
        self._router: Router = site.make_router()
        self._workers = site.workers
        self._seed = seed
        self._sent = self._named = self._turn = 0
        self._running: dict[str, list[str]] = {worker: [] for worker in site.workers}
        self._blocks: dict[str, list[tuple[int, ...]]] = {worker: [] for worker in site.workers}
        self._page = site.page_tokens
        for _ in range(site.replicas * BATCH + waiting):
            self._arrive()
        for worker in site.workers:
            for _ in range(BATCH):
                self._router.handle(self._stored(worker), 0.0)

    def point(self) -> tuple[float, float]:
        """CPU seconds of metadata and of matching for the next worker's batching point."""
        worker = self._workers[self._turn % len(self._workers)]
        self._turn += 1
        stored, removed = self._stored(worker), Removed(worker, self._blocks[worker].pop(0))
        done = Done(self._running[worker].pop(0), output_tokens=OUTPUT_TOKENS)
        start_s = process_time()
        self._router.handle(stored, 0.0)
        self._router.handle(removed, 0.0)
        told_s = process_time()
        actions = self._router.handle(done, 0.0)
        end_s = process_time()
        self._note(actions)
        self._arrive()
        return told_s - start_s, end_s - told_s

    def _arrive(self) -> None:
        index, self._sent = self._sent, self._sent + 1
        prefix = filler_tokens(f"{self._seed}/{index % PREFIXES}", PREFIX_TOKENS)
        own = filler_tokens(f"{self._seed}/{index}/own", INPUT_TOKENS - PREFIX_TOKENS)
        arrive = Arrive(str(index), f"client {index % CLIENTS}", prefix + own, OUTPUT_TOKENS)
        self._note(self._router.handle(arrive, 0.0))

    def _note(self, actions: Sequence[tuple[bytes, object]]) -> None:
        for _, said in actions:
            if isinstance(said, Place):
                self._running[said.worker].append(said.id)

    def _stored(self, worker: str) -> Stored:
        """A prompt and its answer, which the worker has cached."""
        count = (INPUT_TOKENS + OUTPUT_TOKENS) // self._page
        hashes = tuple(range(self._named, self._named + count))
        self._named += count
        self._blocks[worker].append(hashes)
        tokens = filler_tokens(f"{self._seed}/cached/{self._named}", count * self._page)
        return Stored(worker, hashes, None, tokens, self._page)


def _draw(canvas: "Canvas", sides: Mapping[str, Mapping[int, Result]]) -> None:
    for axes, (title, results) in zip(style.panels(canvas, len(sides)), sides.items(), strict=True):
        below = [0.0] * len(results)
        for place, (part, label) in enumerate(PARTS.items()):
            heights = [1000 * result.number(f"{part}_s") for result in results.values()]
            axes.bar(
                range(len(results)), heights, 0.6, bottom=below, label=label, color=style.client_colour(place)
            )
            below = [low + height for low, height in zip(below, heights, strict=True)]
        step_s = next(iter(results.values())).number("decode_s")
        axes.axhline(1000 * step_s, color="black", linestyle=":", label="one decode step, batch 25")
        axes.set_xticks(range(len(results)), [str(value) for value in results])
        style.label(axes, title, "ms")
