"""The workers that are up: their load, the requests in flight at each, and which of them take new requests.

A worker takes no new requests while it drains or is sick. It is sick as long as any peer says that it does not
answer, so each peer has a vote, which it changes or which is dropped with the peer.

Workers that have one model are a `Pool`. A request is offered to the workers of its model's pool alone, whatever the
placement: `meant` is the rule.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import msgspec

from router.events import Posted, Workers, WorkerUp
from router.models import meant
from router.placement.contract import Placement
from router.placement.round_robin import RoundRobin

_SHARE = 0.2
"""Weight of the latest answer in a client's mean, and below in the mean of all clients."""

_SHARE_OF_ALL = 0.01

_FIRST_GUESS_TOKENS = 128.0


class ExpectedOutputs:
    """How long an answer will be: an exponentially decaying mean of the client's past answers; before its first one,
    that of all clients. Loads in tokens are computed with it, never what a request costs. The client whose last answer
    is the oldest is forgotten."""

    def __init__(self, max_clients: int = 10_000) -> None:
        self._max_clients = max_clients
        self._all = _FIRST_GUESS_TOKENS
        self._means: OrderedDict[str, float] = OrderedDict()

    def of(self, client: str, limit_tokens: int) -> float:
        """Expected output tokens of the client's next answer. `limit_tokens` is 0 if the request names no limit."""
        mean = self._means.get(client, self._all)
        return min(mean, limit_tokens) if limit_tokens else mean

    def learn(self, client: str, output_tokens: int) -> None:
        """An answer of `client` is complete, with `output_tokens` tokens."""
        mean = self._means.get(client, self._all)
        self._means[client] = mean + _SHARE * (output_tokens - mean)
        self._means.move_to_end(client)
        self._all += _SHARE_OF_ALL * (output_tokens - self._all)
        if len(self._means) > self._max_clients:
            self._means.popitem(last=False)


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
    """A worker that is up, as `up` says. Placements see it as a `WorkerView`."""

    up: WorkerUp
    pool: Pool
    name: str = field(init=False)
    capacity: float = field(init=False)
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

    def __post_init__(self) -> None:
        self.name, self.capacity = self.up.worker, self.up.capacity

    @property
    def sick(self) -> bool:
        """Whether any peer says that it does not answer."""
        return bool(self.sick_votes)

    @property
    def takes_requests(self) -> bool:
        return not (self.draining or self.sick or self.swapping)

    def change(self, **fields: object) -> None:
        """These fields of `up` are others from now on."""
        self.up = msgspec.structs.replace(self.up, **fields)
        self.capacity = self.up.capacity
        self.count(0)

    def count(self, requests: int) -> None:
        """Adds `requests` (negative: takes away) to those in flight."""
        self.in_flight += requests
        assert self.in_flight >= 0, self.name
        self.load = self.in_flight / self.capacity
        if not self.in_flight:
            self.decode_tokens = 0.0  # drop what rounding has left over


class WorkerTable:
    """The workers that are up, and a placement for each model; one that holds requests is that of all models: the queue
    of all. Only its methods change who is in it and who takes new requests."""

    def __init__(self, placement: Placement) -> None:
        """`placement` is that of the first model; the others are made like it."""
        self.by_name: dict[str, Worker] = {}
        """In the order of names."""
        self.taking: list[Worker] = []
        """Those that take new requests, in the order of names."""
        self.pools: dict[str, Pool] = {}
        """By model. A pool stays without workers: what its placement knows of clients may be of use again."""
        self._placement, self._fresh = placement, deepcopy(placement)
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
        assert up.worker not in self.by_name, up.worker
        self._learn_all(up.models)
        worker = Worker(up, self._pool_of(up))
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
        if (worker.up.models, worker.swapping) == (models, is_swapping):
            return
        worker.swapping = is_swapping
        worker.change(models=models, loaded=worker.up.loaded if worker.up.loaded in models else "")
        self._learn_all(models)
        self._list_taking()

    def set_loaded(self, worker: Worker, model: str) -> None:
        """`worker`, which can load it, serves `model` from here on; "": none."""
        worker.change(loaded=model)
        worker.pool = self._pool_of(worker.up)
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

    def placement_of(self, worker: Worker) -> Placement:
        """That learns of the worker's coming and going."""
        return self._placement if self._placement.holds else worker.pool.placement

    # -- clients

    @property
    def placements(self) -> list[Placement]:
        """Each once."""
        if self._placement.holds:
            return [self._placement]
        return [pool.placement for pool in self.pools.values()]

    def weigh(self, client: str, weight: float, version: int, present: Callable[[], Collection[str]]) -> None:
        """`client` has this weight by the tenants' file of this version. `present` are the clients that have requests,
        whose weights are kept."""
        for placement in self.placements:
            weights = placement.weights
            if weights is None:
                return
            if weights.tell(client, weight, version):
                placement.reweighed(client)
            if weights.are_many:
                weights.forget(present().__contains__)

    def credits(self, limit: int) -> dict[str, dict[str, float]]:
        """Client -> worker -> credit of at most `limit` clients, at the workers of all models."""
        found: dict[str, dict[str, float]] = {}
        for placement in self.placements:
            for client, row in placement.credits(limit).items():
                if client in found:
                    found[client] |= row
                elif len(found) < limit:
                    found[client] = dict(row)
        return found

    # -- looking in

    def listing(self, request_id: str, run: str, limits: Posted | None, plans: bool) -> Workers:
        return Workers(
            request_id,
            tuple(worker.up for worker in self),
            draining=tuple(w.name for w in self if w.draining),
            sick=tuple(w.name for w in self if w.sick),
            router=run,
            limits=limits,
            plans=plans,
        )

    def why_nobody(self, model: str) -> str:
        """Why no worker can take a request for `model`."""
        if not self.by_name:
            return "no worker is up"
        pool = self.pool(model)
        if pool is self.nobody:
            return f"no worker has model {model}" if model else "there are several models, and it names none"
        which = f" of model {pool.model}" if len(self.pools) > 1 else ""
        if not any(worker.pool is pool for worker in self):
            return f"no worker{which} is up"
        if not pool.taking:
            return f"no worker{which} takes requests: each drains or does not answer"
        return f"every worker{which} that is up is excluded"

    def _pool_of(self, up: WorkerUp) -> Pool:
        model = None if up.models and not up.loaded else meant(up.loaded, self._known)
        return self.nobody if model is None else self.pools[model]

    def _learn_all(self, models: Iterable[str]) -> None:
        for model in models:
            if model not in self._known:
                self._learn(model)

    def _learn(self, model: str) -> None:
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
        is_first = not self.pools and not self._known
        made = self._placement if is_first or self._placement.holds else deepcopy(self._fresh)
        pool = self.pools[model] = Pool(model, made)
        return pool

    def _list_taking(self) -> None:
        self.taking = [one for one in self if one.takes_requests and self._is_meant(one)]
        for pool in self.pools.values():
            pool.taking = [one for one in self.taking if one.pool is pool]
            pool.names_taking = tuple(one.name for one in pool.taking)

    def _is_meant(self, worker: Worker) -> bool:
        """Whether requests for its pool's model can be for it, too; not if it says nothing, and there are others."""
        return worker.pool is not self.nobody and meant(worker.up.loaded, self._known) == worker.pool.model
