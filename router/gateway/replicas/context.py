"""How long a prompt may be, by model: what the replicas say about theirs at `GET /v1/models`.

A replica refuses a prompt that is too long only after its HTTP process has tokenized all of it, and it answers nobody
meanwhile. So the gateway refuses it first. The longest context of all replicas of the model is the limit, because it
is not known yet which of them will serve. If any of these does not say, there is no limit, and the replicas judge.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from router.events import WorkerUp
from router.gateway.replicas.health import Get
from router.models import meant

LOOK_S = 1.0
"""Between two looks for new replicas."""

ASK_AGAIN_S = 60.0
"""A replica may have been replaced by another server at the same address."""


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def _models_in(answer: bytes) -> list[_Model]:
    try:
        return msgspec.json.decode(answer, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


def context_of(answer: bytes) -> int | None:
    """The longest context of the models in an answer, in tokens; None if it names none."""
    return max((one.max_model_len or 0 for one in _models_in(answer)), default=0) or None


def names_of(answer: bytes) -> list[str]:
    return [one.id for one in _models_in(answer) if one.id]


class Contexts:
    """What each replica says, and the limits that follow."""

    def __init__(self, workers: Callable[[], Mapping[str, WorkerUp]], get: Get) -> None:
        """`workers` are those that the router names."""
        self._get = get
        self._models: frozenset[str] = frozenset()
        self._limits: dict[str | None, int | None] = {}
        self._workers = workers
        self._answers: dict[tuple[str, str], tuple[float, int | None]] = {}
        """By name and address of a replica: when it answered, and what."""

    def tokens(self, model: str) -> int | None:
        """The limit for prompts of `model`; None if there is none."""
        return self._limits.get(meant(model, self._models))

    async def run(self) -> None:
        """Asks new replicas at once and known ones now and then, until it is cancelled."""
        while True:
            now_s = time.monotonic()
            known = {(name, up.url) for name, up in self._workers().items()}
            self._answers = {one: answer for one, answer in self._answers.items() if one in known}
            due = [
                one
                for one in known
                if one not in self._answers or now_s - self._answers[one][0] >= ASK_AGAIN_S
            ]
            await asyncio.gather(*map(self._ask, due))
            self._reckon()
            await asyncio.sleep(LOOK_S)

    async def _ask(self, worker: tuple[str, str]) -> None:
        with suppress(OSError):  # it is not up yet: it is asked again soon
            status, body = await self._get(worker[1], "/v1/models")
            self._answers[worker] = time.monotonic(), context_of(body) if status == 200 else None

    def _reckon(self) -> None:
        workers = self._workers()
        self._models = frozenset(
            model for up in workers.values() for model in (*up.models, up.loaded) if model
        )
        said: dict[str | None, list[int]] = {}
        for (name, _), (_, tokens) in self._answers.items():
            if name in workers:
                for model in workers[name].models or (workers[name].loaded,):
                    said.setdefault(meant(model, self._models), []).append(tokens or 0)
        self._limits = {model: max(each) if min(each) > 0 else None for model, each in said.items()}
