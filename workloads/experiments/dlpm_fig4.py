"""DLPM, Figure 4: what one central DLPM queue costs, measured on our own router and its central placement.

The router of `centralized_dlpm` is the global scheduler. At each batching point of a worker it learns what the
worker's cache gained and lost, and that a request is done. Then it matches the whole queue against that worker's tree
and hands out the next request. The times are

    metadata         CPU time to process the cache's changes
    prefix match     CPU time to process that a request is done: matching the whole queue, and the choice
    synchronisation  not measured but added up: the router is one thread, so where the D workers' batching points
                     coincide, a worker waits for those before it, on average (D - 1) / 2 times the two above

CPU times are of Python on this machine; the decode step beside them is the cost model's, of an A100.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from time import process_time  # CPU time is what is measured here
from typing import TYPE_CHECKING

from router.core import Router
from router.events import Arrive, Done, Place, Removed, Stored
from workloads.experiments import style
from workloads.experiments.claims import Drawing
from workloads.experiments.contract import Cell, Experiment, Json, Measured, Result, Size, TrafficSpec
from workloads.experiments.program_senders import filler_tokens
from workloads.session import Plan
from workloads.simulation import Site

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

REPLICAS, QUEUES = (1, 2, 4, 8), (25, 50, 100, 200, 400)
QUEUE, DEGREE = 100, 4
"""The fixed value of one while the other is swept."""
BATCH, STEPS = 25, 10
"""Requests a worker runs, and decode steps between two batching points."""
PREFIX_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 1024, 1184, 256
"""Of a request."""
PREFIXES = 32
"""Requests use so many prefixes in turn, so each one that waits has a prefix that some worker holds."""
PARTS = {"metadata": "metadata", "synchronisation": "synchronisation", "match": "prefix match"}
CLIENTS = 8


class Figure4(Experiment):
    id = "dlpm-fig4"

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
                    stall_ms=0.0,
                ),
                TrafficSpec("queue", {"waiting": queue, "points": points}),
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

    def values(self, results: Mapping[str, Result]) -> Mapping[str, Json]:
        by_degree, by_queue = _by_degree(results), _by_queue(results)
        matches = [result.number("match_s") for result in by_degree.values()]
        return {
            "degrees": ", ".join(map(str, by_degree)),
            "fewest": f"{min(by_degree)}.{QUEUE}",
            "most": f"{max(by_degree)}.{QUEUE}",
            "top": max(by_degree),
            "shortest": min(by_queue),
            "longest": max(by_queue),
            "matches": matches,
            "matches_ms": ", ".join(f"{1000 * one:.2f}" for one in matches),
            "rises": all(later > sooner for sooner, later in pairwise(matches)),
            "points": [
                {"cell": name, "degree": name.split(".")[0], "queue": int(name.split(".")[1])}
                for name in results
            ],
        }

    def drawings(self, results: Mapping[str, Result]) -> Mapping[str, Drawing]:
        sides = {"workers": _by_degree(results), "queue length": _by_queue(results)}
        return {"overhead": Drawing(lambda canvas: _draw(canvas, sides), (9.0, 3.6))}


def _by_degree(results: Mapping[str, Result]) -> dict[int, Result]:
    return {degree: results[f"{degree}.{QUEUE}"] for degree in REPLICAS if f"{degree}.{QUEUE}" in results}


def _by_queue(results: Mapping[str, Result]) -> dict[int, Result]:
    return {queue: results[f"{DEGREE}.{queue}"] for queue in QUEUES if f"{DEGREE}.{queue}" in results}


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
        changed_s = process_time()
        actions = self._router.handle(done, 0.0)
        end_s = process_time()
        self._note(actions)
        self._arrive()
        return changed_s - start_s, end_s - changed_s

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
        """The event that the worker has cached a prompt and its answer."""
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
