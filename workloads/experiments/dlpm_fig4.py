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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, pairwise
from statistics import median
from time import process_time  # CPU time is what is measured here

from router.core import Router
from router.events import Arrive, Done, Place, Removed, Stored
from workloads.experiments.claims import Part, Table, at_least, at_most, graded
from workloads.experiments.contract import Cell, Experiment, Measured, Result, Row, TrafficSpec
from workloads.experiments.senders import filler_tokens
from workloads.plots import Figure, Panel
from workloads.session import Plan
from workloads.simulation import Site

REPLICAS, QUEUES = (1, 2, 4, 8), (25, 50, 100, 200, 400)
QUEUE, DEGREE = 100, 4
"""The fixed value of one while the other is swept."""
BATCH, STEPS = 25, 10
"""Requests a worker runs, and decode steps between two batching points."""
PREFIX_TOKENS, INPUT_TOKENS, OUTPUT_TOKENS = 1024, 1184, 256
PREFIXES = 32
"""Requests use so many prefixes in turn, so each one that waits has a prefix that some worker holds."""
PARTS = {"metadata": "metadata", "synchronisation": "synchronisation", "match": "prefix match"}
CLIENTS = 8


class Figure4(Experiment):
    id = "dlpm-fig4"
    title = "What a central queue costs"
    source = "DLPM, Figures 4a and 4b"
    about = f"""CPU time of our own router with the placement `centralized_dlpm`, for each batching point of a worker
        that runs {BATCH} requests, of {INPUT_TOKENS:,} tokens, that begin with one of {PREFIXES} prefixes of
        {PREFIX_TOKENS:,}. Our router is one thread without locks, so synchronisation is what workers wait for each
        other where their points coincide: the turns of half of the others on average, which is added up, not
        measured. For reference: a decode step of Llama-3.1-8B on an A100 with {BATCH} requests, by the cost model.
        Times are this machine's."""

    seeds = ("0",)

    def rows(self, full: bool, length_s: float) -> Iterable[Row]:
        runs = [(degree, QUEUE) for degree in (REPLICAS if full else (1, 4))]
        runs += [(DEGREE, queue) for queue in (QUEUES if full else (25,)) if queue != QUEUE]
        site = Site(placement="centralized_dlpm", placement_options={"slots": BATCH}, stall_ms=0.0)
        for degree, queue in runs:
            sent = TrafficSpec("queue", {"waiting": queue, "points": 40 if full else 8})
            yield Row(f"{degree}.{queue}", replace(site, replicas=degree), sent, plan=Plan(1.0))

    def run(self, cell: Cell, seed: str) -> Measured:
        measured = _Points(cell.site, cell.traffic.arguments["waiting"], seed)
        points = [measured.point() for _ in range(cell.traffic.arguments["points"])]
        one_s = [median(times) for times in zip(*points, strict=True)]
        context = BATCH * (INPUT_TOKENS + OUTPUT_TOKENS // 2)
        found = {
            "metadata_s": one_s[0],
            "match_s": one_s[1],
            "synchronisation_s": (cell.site.replicas - 1) / 2 * sum(one_s),
            "decode_s": cell.site.make_cost_model().decode_s(BATCH, context),
        }
        return Measured(found, 0.0)

    def report(self, at: Mapping[str, Result]) -> Iterator[Part]:
        by_degree = {degree: at[f"{degree}.{QUEUE}"] for degree in REPLICAS if f"{degree}.{QUEUE}" in at}
        by_queue = {queue: at[f"{DEGREE}.{queue}"] for queue in QUEUES if f"{DEGREE}.{queue}" in at}
        fewest, top, shortest, longest = min(by_degree), max(by_degree), min(by_queue), max(by_queue)
        most = by_degree[top]
        flat = most["metadata_s"] / by_degree[fewest]["metadata_s"]
        yield at_most(flat, 1.5, 2.5).claim(f"""Metadata of one worker costs about the same however many
            workers there are | about constant | {flat:.2f}× at D = {top} | One tree for all workers grows
            with them.""")
        matches = [result["match_s"] for result in by_degree.values()]
        rises = all(later > sooner for sooner, later in pairwise(matches))
        yield graded(rises and matches[-1] >= 1.2 * matches[0], rises).claim(f"""Synchronisation and prefix
            matching grow with the number of workers | both grow | prefix match
            {", ".join(f"{1000 * one:.2f}" for one in matches)} ms at D = {", ".join(map(str, by_degree))};
            synchronisation, which is added up, to {1000 * most["synchronisation_s"]:.1f} ms | All workers'
            trees are one here, walked once a request, so matching does not grow with them. That
            synchronisation grows follows from how it is added up.""")
        queued = by_queue[longest]["match_s"] / by_queue[shortest]["match_s"]
        yield at_least(queued, 0.5 * longest / shortest, 1.5).claim(f"""Prefix matching grows with the queue |
            grows | {queued:.1f}× from {shortest} to {longest} requests""")
        share = sum(most[f"{part}_s"] for part in PARTS) / most["decode_s"]
        yield at_least(share, 0.3, 0.15).claim(f"""At D = {REPLICAS[3]} it is a large part of decoding (queue
            of {QUEUE}) | about 40 % of a decode step | at D = {top} {share:.0%} of one step,
            {share / STEPS:.0%} of the {STEPS} between two batching points | Our tree goes from page to page
            of 16 tokens by look-ups, so matching is cheap, and no worker has to wait for a lock. Matching
            alone takes {queued:.1f} times as long with a queue of {longest} as with {shortest}.""")
        head = "D | queue | metadata | synchronisation | prefix match | one decode step"
        lines = [
            [*name.split("."), *(1000 * one[f"{part}_s"] for part in (*PARTS, "decode"))]
            for name, one in at.items()
        ]
        yield Table("For one batching point of one worker, ms (medians)", head, lines)
        step, panels = {f"one decode step, batch {BATCH}": 1000 * most["decode_s"]}, []
        for title, found in (("workers", by_degree), ("queue length", by_queue)):
            bars = {
                label: [1000 * one[f"{part}_s"] for one in found.values()] for part, label in PARTS.items()
            }
            panels.append(
                Panel("ms", title=f"by {title}", groups=list(map(str, found)), bars=bars, levels=step)
            )
        caption = "The scheduler's time for one batching point; the line is one decode step."
        yield Figure("overhead", caption, [panels])


class _Points:
    """A router whose workers are full and whose queue has a given length at every batching point."""

    def __init__(self, site: Site, waiting: int, seed: str) -> None:
        self._router: Router = site.make_router()
        self._workers, self._page, self._seed = cycle(site.workers), site.page_tokens, seed
        self._sent = self._named = 0
        self._running: dict[str, list[str]] = {worker: [] for worker in site.workers}
        self._blocks: dict[str, list[tuple[int, ...]]] = {worker: [] for worker in site.workers}
        for _ in range(site.replicas * BATCH + waiting):
            self._arrive()
        for worker in site.workers:
            for _ in range(BATCH):
                self._router.handle(self._stored(worker), 0.0)

    def point(self) -> tuple[float, float]:
        """CPU seconds of metadata and of matching for the next worker's batching point."""
        worker = next(self._workers)
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
