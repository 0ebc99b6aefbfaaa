"""One replica, in steps instead of seconds: what an engine does to a `FairQueue`, and a record of what it gave.

A step is SGLang's: a batch is formed by the same `Admission` as in the overlay and the simulator, and then every
running request advances by one token. Before each pass all waiting requests are looked up, not a bounded number. A
request fits if the prompt and the longest allowed output do, so memory never runs out later (assumption H2 of the
theorems). A prompt
longer than what is left of the step's token budget is computed in chunks; one request at most is in chunks.
For policies that look at a clock, a step takes a second.

With the rule of steps (`Steps`) a step is for prompts or for those that run, as in SGLang without mixed chunks, and
takes as long as what it computes.

Service is metered here a second time, from what the engine computed, so that the books can be checked.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from random import Random

from hypothesis import strategies as st

from sglang_fair.core.admission import Admission
from sglang_fair.core.cost import Cost, Linear
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.payers import Payers, path_of
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import Steps
from sglang_fair.core.waits import MEMORY, PROMPTS

Tokens = tuple[int, ...]

BASE_S, PROMPT_TOKEN_S, REQUEST_S = 0.01, 0.001, 0.0005
"""With the rule of steps: how long a step takes at least, and for each prompt token or each request that decodes."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sends; `output_tokens` is known to the model alone."""

    id: str
    client: str
    tokens: Tokens
    output_tokens: int
    max_output_tokens: int
    system: bool = False
    weight: float | None = None
    weight_version: int = 0
    slack_s: float | None = None
    tier: int = 0
    call: int = 1
    session: str = ""

    @property
    def reserved_tokens(self) -> int:
        return len(self.tokens) + self.max_output_tokens


class PrefixCache:
    """A radix cache, said without a tree: the set of cached prefixes, each a whole number of pages.

    Running requests pin theirs. The others are evicted by last use; a use refreshes the longest prefix first
    and the shortest last, so the one that was refreshed least recently is always a leaf.
    """

    def __init__(self, capacity_tokens: int, page_tokens: int = 1) -> None:
        self._capacity, self._page = capacity_tokens // page_tokens, page_tokens
        self._pages: OrderedDict[Tokens, None] = OrderedDict()
        self._pinned: Counter[Tokens] = Counter()
        self.changes = 0
        """Grows whenever what is cached may have changed."""

    def match(self, tokens: Tokens) -> int:
        """Cached tokens of a prompt. Its last token is never taken from the cache: it has to be computed."""
        length = 0
        while (end := length + self._page) < len(tokens):
            if tokens[:end] not in self._pages and tokens[:end] not in self._pinned:
                break
            length = end
        return length

    def insert(self, tokens: Tokens) -> None:
        self.changes += bool(tokens)
        for prefix in self._prefixes(tokens):
            self._pages[prefix] = None
            self._pages.move_to_end(prefix)
        while len(self._pages) > self._capacity:
            self._pages.popitem(last=False)

    def pin(self, tokens: Tokens) -> None:
        self.changes += bool(tokens)
        self._pinned.update(self._prefixes(tokens))

    def unpin(self, tokens: Tokens) -> None:
        self.changes += bool(tokens)
        for prefix in self._prefixes(tokens):
            self._pinned[prefix] -= 1
            if not self._pinned[prefix]:
                del self._pinned[prefix]

    def _prefixes(self, tokens: Tokens) -> list[Tokens]:
        """Longest first."""
        return [tokens[:end] for end in range(len(tokens) // self._page * self._page, 0, -self._page)]


@dataclass(slots=True)
class Running:
    """An admitted request: `computed` prompt tokens are in the batch or in the cache, `pinned` in the cache. The last
    `extended` of them were computed by its last step for prompts."""

    request: Request
    job: Job
    computed: int
    pinned: Tokens = ()
    extended: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """One line of a trace."""

    step: int
    id: str
    client: str
    cached_tokens: int
    extend_tokens: int


Watcher = Callable[[], None]


class EngineModel:
    """`pool_tokens` is M. `block_tokens` is how many uncached tokens two requests must share to be taken for
    the same prefix; None switches the queue's deferral off. `step_tokens` None: prompts are never cut. `shared` is the
    rule of steps; None: prompts go first, and those that run get a token in every step."""

    def __init__(
        self,
        queue: FairQueue,
        *,
        pool_tokens: int,
        cache_tokens: int = 0,
        page_tokens: int = 1,
        step_tokens: int | None = None,
        block_tokens: int | None = 1,
        shared: Steps | None = None,
    ) -> None:
        self.queue = queue
        self.admission = Admission(queue, self._look_up, shared)
        self.cache = PrefixCache(cache_tokens, page_tokens)
        self.pool_tokens = pool_tokens
        self.step_tokens = step_tokens
        self.block_tokens = block_tokens
        self.steps = 0
        self.service: Counter[str] = Counter()
        """Units per client, by the model's own count."""
        self.admissions: list[Admitted] = []
        self.ended: list[str] = []
        self.refused: list[str] = []
        """Requests that the policy did not let in."""
        self.candidate: Job | None = None
        """Whom the last pass stopped at because it did not fit; None if the pass ended for another reason."""
        self.passed_over: list[Job] = []
        """Who still waited when the last pass ended for neither reason: nobody was offered any more."""
        self.watchers: list[Watcher] = []
        self.waiting: Counter[str] = Counter()
        self.running: Counter[str] = Counter()
        """Requests per client, by the model's own count."""
        self._requests: dict[str, Request] = {}
        self._matched: dict[str, tuple[int, int]] = {}
        """Of each request: how often the cache had changed when it was looked up, and what was found."""
        self._received: dict[str, tuple[int, int, int]] = {}
        """Of each request: its prompt tokens that were computed, its output tokens, and its prompt tokens that were
        cached. Each counts once, however often the request was taken back."""
        self._running: dict[str, Running] = {}
        self._chunked: Running | None = None

    # ---- what clients do

    def arrive(self, request: Request) -> None:
        assert request.reserved_tokens <= self.pool_tokens, "an engine refuses what can never fit"
        job = Job(
            id=request.id,
            client=request.client,
            prompt_tokens=len(request.tokens),
            max_output_tokens=request.max_output_tokens,
            expected_output_tokens=request.output_tokens,
            system=request.system,
            weight=request.weight,
            weight_version=request.weight_version,
            deadline_s=None if request.slack_s is None else self.steps + request.slack_s,
            tier=request.tier,
            call=request.call,
            session=request.session,
            arrived_s=self.steps,
        )
        self.admission.tick(self.steps)
        if self.admission.refuses(job) is not None:
            self.refused.append(request.id)
            return
        self._requests[request.id] = request
        self.admission.arrive(job)
        self._moved(request, waiting=1)
        self._happened()

    def abort(self, request_id: str) -> None:
        job = self.queue.find(request_id)
        if job is not None and self.queue.is_waiting(request_id):
            self._moved(self._requests[request_id], waiting=-1)
            self.admission.leave(job)
            self._forget(request_id)
            self._happened()
        elif request_id in self._running:
            self._end(self._running[request_id])

    # ---- what the engine does

    def step(self) -> None:
        """Form a batch, compute it, hand out its tokens."""
        self.steps += 1
        for job in list(self.queue.waiting()):
            self.admission.looked_up(job, *self._look_up(job))
        self.admission.tick(self.steps)
        self.admission.begin_pass(self.cache.changes, lambda: any(self._decoding()))
        batch = self._form_batch()
        served = list(self._decoding())
        for running in batch:
            self._pin(running, running.request.tokens[: running.computed])
        self.admission.computed(running.job for running in batch)
        if self.admission.steps is not None:
            served = self._take_time(batch, served)
        for running in served:
            self._emit(running)

    def _take_time(self, batch: Sequence[Running], served: list[Running]) -> list[Running]:
        """The step is over. Returns those that get a token by it."""
        if not batch:
            if served:
                length_s = BASE_S + REQUEST_S * len(served)
                self.admission.step(length_s, decoded=1, requests=len(served))
            return served
        extended: Counter[str] = Counter()
        for running in batch:
            extended[SYSTEM if running.request.system else running.request.client] += running.extended
        self.admission.step(BASE_S + PROMPT_TOKEN_S * extended.total(), extended)
        return [running for running in batch if running is not self._chunked]

    def _decoding(self) -> Iterator[Running]:
        """Those whose prompt is computed."""
        return (running for running in self._running.values() if running is not self._chunked)

    def retract(self, request_id: str) -> None:
        """Memory ran out after all: the request gives up what was computed for it and waits again."""
        running = self._running.pop(request_id)
        self._chunked = None if running is self._chunked else self._chunked
        self._pin(running, ())
        self._moved(running.request, waiting=1, running=-1)
        self.admission.retract(running.job)
        self._happened()

    def fits(self, request: Request) -> bool:
        reserved = sum(entry.request.reserved_tokens for entry in self._running.values())
        return request.reserved_tokens <= self.pool_tokens - reserved

    def is_here(self, request_id: str) -> bool:
        return request_id in self._requests

    def _form_batch(self) -> list[Running]:
        most = self.admission.chunk_tokens(None if self._chunked is None else self._chunked.job)
        left = min(each for each in (self.step_tokens, most, 1 << 60) if each is not None)
        self.candidate, self.passed_over = None, []
        batch: list[Running] = []
        if (running := self._chunked) is not None and self.admission.goes_on(running.job):
            tokens = self.admission.chunk_of(
                running.job, left, self._block(running.request, running.computed)
            )
            left -= self._compute(running, tokens, first=False)
            batch.append(running)
        candidates = self.admission.candidates()
        while left > 0 and (self._chunked is None or most is not None):
            if (job := next(candidates, None)) is None:
                break
            request = self._requests[job.id]
            if not self.fits(request):
                self.candidate = job
                break
            matched, block = self._look_up(job)
            if not self.admission.confirm(job, matched, block):
                continue
            if self._chunked is not None and len(request.tokens) + job.output_tokens - matched > left:
                break  # one prompt at a time is cut
            running = Running(request, job, matched)
            left -= self._compute(running, left, first=True)
            batch.append(running)
        is_full = left <= 0 or self._chunked is not None
        self.admission.end_pass(MEMORY if self.candidate else PROMPTS if is_full else None)
        if self.candidate is None and not is_full:
            self.passed_over = list(self.queue.waiting())
        return batch

    def _compute(self, running: Running, left: int, *, first: bool) -> int:
        """Put the next tokens of a prompt into the batch. Returns how many."""
        job, request = running.job, running.request
        # What a retracted request had made of its output is part of the prompt that is computed again.
        prompt_tokens = len(request.tokens) + job.output_tokens
        cached = running.computed
        extend = min(left, prompt_tokens - cached)
        if first:
            self._running[request.id] = running
            self._moved(request, waiting=-1, running=1)
            self.admissions.append(Admitted(self.steps, request.id, request.client, cached, extend))
            payers = self.queue.account.payers
            path = path_of(None, request.tokens, payers.block_tokens) if payers else ()
            self.admission.admit(job, extend_tokens=extend, cached_tokens=cached, path=path)
        else:
            self.admission.extend(job, extend, self._block(request, cached))
        running.computed, running.extended = cached + extend, extend
        self._chunked = running if running.computed < prompt_tokens else None
        self._meter(request, reached=cached + extend, cached=cached)
        self.queue.account.ledger.engine_counted(extend=extend)
        self._happened()
        return extend

    def _emit(self, running: Running) -> None:
        request, job = running.request, running.job
        self.queue.account.emit(job, 1)
        self.queue.account.ledger.engine_counted(output=1)
        self._meter(request, output=1)
        self._happened()
        if job.output_tokens + job.unasked_tokens >= request.output_tokens:
            self._end(running)

    def _end(self, running: Running) -> None:
        del self._running[running.request.id]
        self._chunked = None if running is self._chunked else self._chunked
        self._pin(running, ())
        self._moved(running.request, running=-1)
        self.admission.finish(running.job)
        self._forget(running.request.id)
        self._happened()

    def _forget(self, request_id: str) -> None:
        self.ended.append(request_id)
        del self._requests[request_id]
        self._matched.pop(request_id, None)
        self._received.pop(request_id, None)

    def _pin(self, running: Running, tokens: Tokens) -> None:
        self.cache.pin(tokens)
        self.cache.unpin(running.pinned)
        self.cache.insert(running.pinned)
        running.pinned = tokens

    def _moved(self, request: Request, *, waiting: int = 0, running: int = 0) -> None:
        if not request.system:
            self.waiting[request.client] += waiting
            self.running[request.client] += running

    def _meter(self, request: Request, *, reached: int = 0, cached: int = 0, output: int = 0) -> None:
        """Of the prompt the tokens up to `reached` are there, those up to `cached` from the cache."""
        if request.system:
            return
        before = self._received.get(request.id, (0, 0, 0))
        known = before[0] + before[2]
        found = max(0, cached - known)
        computed = max(0, min(reached, len(request.tokens)) - known - found)
        after = (before[0] + computed, before[1] + output, before[2] + found)
        self._received[request.id] = after
        cost = self.queue.account.cost
        self.service[request.client] += cost(*after) - cost(*before)

    def _look_up(self, job: Job) -> tuple[int, Tokens | None]:
        matched = self._match(job)
        return matched, self._block(self._requests[job.id], matched)

    def _match(self, job: Job) -> int:
        changes, matched = self._matched.get(job.id, (-1, 0))
        if changes != self.cache.changes:
            matched = self.cache.match(self._requests[job.id].tokens)
            self._matched[job.id] = self.cache.changes, matched
        return matched

    def _block(self, request: Request, prefix_tokens: int) -> Tokens | None:
        if self.block_tokens is None or prefix_tokens + self.block_tokens > len(request.tokens):
            return None
        return request.tokens[: prefix_tokens + self.block_tokens]

    def _happened(self) -> None:
        for watcher in self.watchers:
            watcher()


# ---- who sends what


@dataclass(frozen=True)
class ClientHabit:
    """One client's habit. It tops its waiting requests up to `depth` during `busy_steps`, then pauses for
    `pause_steps` (0: never). `closed`: it tops up only when nothing of it is here."""

    client: str
    depth: int = 4
    busy_steps: int = 1
    pause_steps: int = 0
    closed: bool = False
    start: int = 0
    prompt_tokens: tuple[int, int] = (1, 8)
    output_tokens: tuple[int, int] = (1, 8)
    families: int = 2
    shared_tokens: int = 4
    private: bool = True
    """Its prompt families are its own; otherwise every client draws from the same ones."""
    abort_every: int = 0
    """Each of its requests is aborted with probability 1 / abort_every in each step; 0: none."""


@dataclass(frozen=True)
class EngineCase:
    """A whole run: the clients, the engine, the seed."""

    loads: tuple[ClientHabit, ...]
    pool_tokens: int
    cache_tokens: int = 0
    page_tokens: int = 1
    step_tokens: int | None = None
    block_tokens: int | None = None
    seed: int = 1
    steps: int = 60

    @property
    def clients(self) -> list[str]:
        return [load.client for load in self.loads]

    @property
    def longest_prompt(self) -> int:
        return max(load.shared_tokens + load.prompt_tokens[1] for load in self.loads)


class Traffic:
    """The clients of a case, seeded: the same case sends the same requests to every policy that serves alike."""

    def __init__(self, case: EngineCase) -> None:
        self._case = case
        self._random = {load.client: Random(f"{case.seed} {load.client}") for load in case.loads}
        self._alive: dict[str, list[str]] = {load.client: [] for load in case.loads}
        self._sent: Counter[str] = Counter()

    def step(self, replica: EngineModel) -> None:
        for load in self._case.loads:
            random, alive = self._random[load.client], self._alive[load.client]
            alive[:] = [id for id in alive if replica.is_here(id)]
            if self._sends(load, replica.steps, alive):
                waiting = sum(replica.queue.is_waiting(id) for id in alive)
                for _ in range(load.depth - waiting):
                    request = self._request(load, random)
                    alive.append(request.id)
                    replica.arrive(request)
            if load.abort_every:
                for id in list(alive):
                    if random.randrange(load.abort_every) == 0:
                        replica.abort(id)

    def _sends(self, load: ClientHabit, step: int, alive: Sequence[str]) -> bool:
        if step < load.start or (load.closed and alive):
            return False
        return (step - load.start) % (load.busy_steps + load.pause_steps) < load.busy_steps

    def _request(self, load: ClientHabit, random: Random) -> Request:
        self._sent[load.client] += 1
        serial = self._sent[load.client]
        owner = self._case.clients.index(load.client) + 1 if load.private else 0
        family = owner * 1000 + random.randrange(load.families)
        shared = tuple(family * 1000 + place for place in range(load.shared_tokens))
        name = self._case.clients.index(load.client)
        own = tuple(
            (name + 1) * 10**9 + serial * 1000 + n for n in range(random.randint(*load.prompt_tokens))
        )
        output = random.randint(*load.output_tokens)
        return Request(f"{load.client}{serial}", load.client, shared + own, output, load.output_tokens[1])


def engine_of(case: EngineCase, queue: FairQueue) -> EngineModel:
    return EngineModel(
        queue,
        pool_tokens=case.pool_tokens,
        cache_tokens=case.cache_tokens,
        page_tokens=case.page_tokens,
        step_tokens=case.step_tokens,
        block_tokens=case.block_tokens,
    )


def run(
    case: EngineCase,
    policy: Policy,
    cost: Cost | None = None,
    watch: Callable[[EngineModel], Watcher] | None = None,
    payers: Payers | None = None,
):
    """The case under a policy, to its end. `watch` makes a watcher, called after every event."""
    replica = engine_of(case, FairQueue(policy, cost or Linear(), payers=payers))
    if watch is not None:
        replica.watchers.append(watch(replica))
    traffic = Traffic(case)
    for _ in range(case.steps):
        traffic.step(replica)
        replica.step()
    return replica


@st.composite
def cases(draw, *, whole_prompts: bool = False, deferral: bool = True, aborts: bool = True) -> EngineCase:
    """Clients that flood, burst and drip, on engines from one request at a time to a dozen."""
    loads = []
    for number in range(draw(st.integers(2, 4))):
        longest, most = draw(st.integers(1, 16)), draw(st.integers(1, 16))
        floods = draw(st.booleans())
        loads.append(
            ClientHabit(
                client="abcdefgh"[number],
                depth=draw(st.integers(6, 16)) if floods else draw(st.integers(1, 6)),
                busy_steps=1 if floods else draw(st.integers(1, 12)),
                pause_steps=0 if floods else draw(st.integers(0, 12)),
                closed=not floods and draw(st.booleans()),
                start=draw(st.sampled_from([0, 0, 0, 7, 20])),
                prompt_tokens=(draw(st.integers(1, longest)), longest),
                output_tokens=(draw(st.integers(1, most)), most),
                families=draw(st.integers(1, 3)),
                shared_tokens=draw(st.integers(0, 12)),
                private=draw(st.booleans()),
                abort_every=draw(st.sampled_from([0, 0, 0, 8])) if aborts else 0,
            )
        )
    largest = max(load.shared_tokens + load.prompt_tokens[1] + load.output_tokens[1] for load in loads)
    return EngineCase(
        loads=tuple(loads),
        pool_tokens=largest + draw(st.integers(0, 6 * largest)),
        cache_tokens=draw(st.sampled_from([0, 16, 64, 256])),
        page_tokens=draw(st.sampled_from([1, 4])),
        step_tokens=None if whole_prompts else draw(st.sampled_from([None, None, 4, 16])),
        block_tokens=draw(st.sampled_from([None, 1, 4])) if deferral else None,
        seed=draw(st.integers(0, 2**20)),
    )


# ---- what was given


@dataclass(frozen=True, slots=True)
class ServedState:
    """After one event: units received so far, divided by the weight, and who has requests where."""

    service: tuple[float, ...]
    waiting: tuple[bool, ...]
    running: tuple[bool, ...]


@dataclass
class Trace:
    """The service of every client after every event. Intervals run between two events."""

    replica: EngineModel
    clients: list[str]
    weights: dict[str, float] = field(default_factory=dict)
    rows: list[ServedState] = field(default_factory=list)

    def __call__(self) -> None:
        replica, names = self.replica, self.clients
        given = [replica.service[name] for name in names]
        if replica.queue.account.payers is not None:
            usage = replica.queue.account.ledger.usage
            given = [units + usage(name).transferred_units for name, units in zip(names, given, strict=True)]
        if self.weights:
            weight = self.weights.get
            given = [units / weight(name, 1.0) for name, units in zip(names, given, strict=True)]
        self.rows.append(
            ServedState(
                tuple(given),
                tuple([replica.waiting[name] > 0 for name in names]),
                tuple([replica.running[name] > 0 for name in names]),
            )
        )

    def gap_between_backlogged(self) -> float:
        """The largest |W_f - W_g| over all intervals in which both have requests waiting all the time."""
        return self.worst_lead(both=True)

    def lag_of_backlogged(self) -> float:
        """The largest W_g - W_f over all intervals in which f has requests waiting all the time, any g."""
        return self.worst_lead(both=False)

    def worst_lead(self, *, both: bool, bounds: Sequence[float] | None = None) -> float:
        """The largest W_g - W_f over all intervals in which f waits, and g too if `both`; in units of the bound that
        was read at its end if there are `bounds`."""
        worst = 0.0
        for f, g in permutations(range(len(self.clients)), 2):
            least = None
            for number, row in enumerate(self.rows):
                if not row.waiting[f] or (both and not row.waiting[g]):
                    least = None
                    continue
                lead = row.service[g] - row.service[f]
                least = lead if least is None else min(least, lead)
                worst = max(worst, (lead - least) / (max(bounds[number], 1e-9) if bounds else 1))
        return worst

    def service_before_dispatch(self) -> float:
        """The most service that the others got between the arrival of a request of a client that had nothing
        here, and the first dispatch of any request of that client."""
        worst = 0.0
        for f in range(len(self.clients)):
            others_at_arrival = None
            for before, row in pairwise(self.rows):
                if row.waiting[f] and not before.waiting[f] and not before.running[f]:
                    others_at_arrival = sum(row.service) - row.service[f]
                elif row.running[f] or not row.waiting[f]:
                    others_at_arrival = None
                if others_at_arrival is not None:
                    worst = max(worst, sum(row.service) - row.service[f] - others_at_arrival)
        return worst


def traced(
    case: EngineCase,
    policy: Policy,
    cost: Cost | None = None,
    weights: dict[str, float] | None = None,
    payers: Payers | None = None,
) -> Trace:
    """Run the case and keep the trace; of charged service where `payers` share prices."""
    kept: list[Trace] = []

    def watch(replica: EngineModel) -> Watcher:
        kept.append(Trace(replica, case.clients, weights or {}))
        return kept[0]

    run(case, policy, cost, watch, payers)
    return kept[0]
