"""The workers that are up: their load, the requests in flight at each, and which of them take new requests.

A worker takes no new requests while it drains or is sick. It is sick as long as any peer says that it does not
answer, so each peer has a vote, which it changes or which is dropped with the peer.

Workers that have one model are a `Pool`. A request is offered to the workers of its model's pool alone, whatever the
placement: `meant` is the rule.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from router.events import Posted, Workers, WorkerUp
from router.models import meant
from router.placement.contract import Placement, Request
from router.placement.outputs import ExpectedOutputs
from router.placement.round_robin import RoundRobin
from router.radix import Hold


@dataclass(slots=True, eq=False)
class Pool:
    """The workers of one model, the placement that chooses among them, and what is known of this model's answers."""

    model: str
    """"" as long as no worker says what it has."""
    placement: Placement
    outputs: ExpectedOutputs = field(default_factory=ExpectedOutputs)
    taking: "list[Worker]" = field(default_factory=list)
    """Those that take new requests, in the order of names."""
    names_taking: tuple[str, ...] = ()

    def key(self, namespace: str) -> str:
        """Under which prefixes of this namespace are cached at its workers."""
        return f"{self.model}\x1e{namespace}" if self.model else namespace


@dataclass(slots=True, eq=False)
class Worker:
    """A worker that is up. Placements see it as a `WorkerView`."""

    name: str
    url: str
    kv: str | None
    replay: str | None
    capacity: float
    pool: Pool
    load_address: str | None = None
    """Where it says how much it has to do."""
    models: tuple[str, ...] = ()
    """Those that it can load; (): it does not say."""
    loaded: str = ""
    kv_tokens: int = 0
    """Of its KV cache, as it said last; 0: it does not say."""
    chunk_tokens: int = 0
    """Of a prefill chunk; 0: it does not say."""
    listed: str = ""
    """The list that names it; "": none does."""
    draining: bool = False
    swapping: bool = False
    """It is about to load another model, or does."""
    sick_votes: set[bytes] = field(default_factory=set)
    """The peers that it does not answer."""
    in_flight: int = 0
    load: float = 0.0
    """`in_flight` per unit of capacity. Stored, because placements read it more often than it changes."""
    prefill_tokens: int = 0
    decode_tokens: float = 0.0
    dispatched: int = 0
    dispatched_tokens: int = 0
    prefilled_tokens: int = 0
    produced_tokens: int = 0
    overrun_tokens: int = 0
    placed: Counter[str] = field(default_factory=Counter)
    """Requests that it was given, by the reason."""

    @property
    def sick(self) -> bool:
        """Whether any peer says that it does not answer."""
        return bool(self.sick_votes)

    @property
    def takes_requests(self) -> bool:
        """Whether it may get new requests."""
        return not (self.draining or self.sick or self.swapping)

    def told(self) -> WorkerUp:
        """What its `WorkerUp` has said."""
        return WorkerUp(
            self.name,
            self.url,
            self.kv,
            self.replay,
            self.capacity,
            self.load_address,
            self.models,
            self.loaded,
            self.kv_tokens,
            self.chunk_tokens,
            self.listed,
        )

    def count(self, requests: int) -> None:
        """Adds `requests` (negative: takes away) to those in flight."""
        self.in_flight += requests
        assert self.in_flight >= 0, self.name
        self.load = self.in_flight / self.capacity
        if not self.in_flight:
            self.decode_tokens = 0.0  # drop what rounding has left over


@dataclass(slots=True, eq=False)
class Flight:
    """A request in flight at `worker`, for the gateway `peer`.

    `prefill_tokens` and `decode_tokens` are the work that is left; they are part of the worker's load.
    """

    request: Request
    worker: Worker
    peer: bytes
    matched_tokens: int
    hold: Hold
    prefill_tokens: int = 0
    decode_tokens: float = 0.0
    output_tokens: int = 0
    overrun_tokens: int = 0
    """Beyond what was expected."""
    placed_s: float = 0.0
    is_cut: bool = False
    """Its gateway was told to cut it off."""

    def begin(self) -> None:
        """Adds the request to its worker's load."""
        worker, input_tokens = self.worker, self.request.input_tokens
        self.prefill_tokens = input_tokens - self.matched_tokens
        self.decode_tokens = self.request.expected_output_tokens
        worker.prefill_tokens += self.prefill_tokens
        worker.decode_tokens += self.decode_tokens
        worker.dispatched += 1
        worker.dispatched_tokens += input_tokens
        worker.count(1)

    def produce(self, output_tokens: int) -> None:
        """`output_tokens` have been produced so far, so the prefill is over. Late reports of less are ignored."""
        if output_tokens > self.output_tokens:
            self.worker.produced_tokens += output_tokens - self.output_tokens
            self.worker.prefilled_tokens += self.prefill_tokens
            self.output_tokens = output_tokens
            self._leave(max(1.0, self.request.expected_output_tokens - output_tokens))
            if (more := output_tokens - int(self.request.expected_output_tokens)) > self.overrun_tokens:
                self.worker.overrun_tokens += more - self.overrun_tokens
                self.overrun_tokens = more

    def end(self, output_tokens: int = 0) -> None:
        """Takes the request off its worker's load. So many output tokens were produced in all, or as many as were
        reported before, if that is more."""
        worker = self.worker
        if output_tokens > self.output_tokens:
            worker.produced_tokens += output_tokens - self.output_tokens
            worker.prefilled_tokens += self.prefill_tokens
        if self.overrun_tokens:
            worker.overrun_tokens -= self.overrun_tokens
        self._leave(0.0)
        worker.count(-1)

    def _leave(self, decode_tokens: float) -> None:
        """So much is left to decode, and nothing to prefill."""
        worker = self.worker
        worker.prefill_tokens -= self.prefill_tokens
        worker.decode_tokens += decode_tokens - self.decode_tokens
        self.prefill_tokens, self.decode_tokens = 0, decode_tokens


class WorkerTable:
    """The workers that are up. Only its methods change who is in it and who takes new requests."""

    def __init__(self, make_placement: Callable[[], Placement]) -> None:
        """Each model has a placement from `make_placement`."""
        self.by_name: dict[str, Worker] = {}
        """In the order of names."""
        self.taking: list[Worker] = []
        """Those that take new requests, in the order of names."""
        self.pools: dict[str, Pool] = {}
        """By model. A pool stays without workers: what its placement knows of clients may be of use again."""
        self._make_placement = make_placement
        self._known: frozenset[str] = frozenset()
        """All models that workers have named so far. One whose workers are gone is still not another one."""
        first = self._make_pool("")
        self.nobody = Pool("", RoundRobin())
        """What no worker is meant by; and who has no model, or none that can be told from the others."""
        self._asked: dict[str, Pool] = {}
        """By what a request says; what is not in it means `_otherwise`."""
        self._otherwise = first

    def pool(self, model: str) -> Pool:
        """The workers that may be sent a request for `model`."""
        return self._asked.get(model, self._otherwise)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.by_name.values())

    def get(self, name: str) -> Worker | None:
        """The worker of this name, if it is up."""
        return self.by_name.get(name)

    def add(self, up: WorkerUp) -> Worker:
        """A worker that was not up before."""
        assert up.worker not in self.by_name, up.worker
        self._learn_all(up.models)
        pool = self._pool_of(up.models, up.loaded)
        worker = Worker(
            up.worker,
            up.url,
            up.kv,
            up.replay,
            up.capacity,
            pool,
            up.load,
            up.models,
            up.loaded,
            up.kv_tokens,
            up.chunk_tokens,
            up.listed,
        )
        # Ties go to the worker that was sent fewer tokens: a newcomer must not win all of them.
        worker.dispatched_tokens = min((other.dispatched_tokens for other in self), default=0)
        self.by_name = dict(sorted({**self.by_name, up.worker: worker}.items()))
        self._list_taking()
        return worker

    def remove(self, name: str) -> None:
        """The worker is gone, and the votes about it."""
        del self.by_name[name]
        self._list_taking()

    def set_draining(self, worker: Worker, draining: bool) -> None:
        """Whether `worker` finishes what it has and takes nothing new."""
        worker.draining = draining
        self._list_taking()

    def set_models(self, worker: Worker, models: tuple[str, ...], *, is_swapping: bool) -> None:
        """Which models `worker` can load, and whether it takes nothing because it is about to load one."""
        if (worker.models, worker.swapping) == (models, is_swapping):
            return
        worker.models, worker.swapping = models, is_swapping
        self._learn_all(models)
        self._list_taking()

    def set_loaded(self, worker: Worker, model: str) -> None:
        """`worker`, which can load it, serves `model` from here on; "": none."""
        worker.loaded = model
        worker.pool = self._pool_of(worker.models, model)
        self._list_taking()

    def look_again(self) -> None:
        """Who may serve whom may have changed: whoever keeps `taking` sees that it is another list."""
        self._list_taking()

    def vote(self, peer: bytes, worker: Worker, *, ok: bool) -> bool:
        """Takes the word of `peer` on the health of `worker`; whether that makes it sick or well."""
        was_sick = worker.sick
        if ok:
            worker.sick_votes.discard(peer)
        else:
            worker.sick_votes.add(peer)
        self._list_taking()
        return worker.sick is not was_sick

    def drop_votes(self, peer: bytes) -> Iterable[Worker]:
        """Takes back what `peer` has said; the workers that are well again."""
        return [worker for worker in self if self.vote(peer, worker, ok=True)]

    def listing(self, request_id: str, limits: Posted | None, plans: bool = False) -> Workers:
        """The answer to `Follow`."""
        return Workers(
            request_id,
            tuple(worker.told() for worker in self),
            draining=tuple(w.name for w in self if w.draining),
            sick=tuple(w.name for w in self if w.sick),
            limits=limits,
            plans=plans,
        )

    def _pool_of(self, models: tuple[str, ...], loaded: str) -> Pool:
        model = None if models and not loaded else meant(loaded, self._known)
        return self.nobody if model is None else self.pools[model]

    def _learn_all(self, models: Iterable[str]) -> None:
        for model in models:
            if model not in self._known:
                self._learn(model)

    def _learn(self, model: str) -> None:
        """A worker has named a model for the first time."""
        first, self._known = not self._known, self._known | {model}
        if first:  # it is what all workers so far were taken to have
            pool = self.pools[model] = self.pools.pop("")
            pool.model = model
        else:
            self._make_pool(model)
        meanings = {said: meant(said, self._known) for said in ("", *self._known)}
        self._asked = {said: self.pools[found] for said, found in meanings.items() if found is not None}
        self._otherwise = self.nobody

    def _make_pool(self, model: str) -> Pool:
        pool = self.pools[model] = Pool(model, self._make_placement())
        return pool

    def _list_taking(self) -> None:
        self.taking = [one for one in self if one.takes_requests and self._is_meant(one)]
        for pool in self.pools.values():
            pool.taking = [one for one in self.taking if one.pool is pool]
            pool.names_taking = tuple(one.name for one in pool.taking)

    def _is_meant(self, worker: Worker) -> bool:
        """Whether requests for its pool's model can be for it, too; not if it says nothing, and there are others."""
        return worker.pool is not self.nobody and meant(worker.loaded, self._known) == worker.pool.model
