"""What replicas say of themselves at `GET /ready` and `GET /v1/models`: which are well, and how long a prompt may be.
Pure; `pool` asks.

Rule. A worker is sick
- when it refuses two connections in a row;
- when it answers 503;
- when nothing has come from it for `timeout_s`: no answer to a health check and no byte for a request;
- when it reports twice in a row that it has requests and that a scheduler hangs (`Liveness`).
It is well again with the next answer that says otherwise. Requests in flight at a worker that is silent or hangs are
given up at once, as if it had died. Those at a worker that answers 503 go on, because a replica that shuts down
finishes what it has.

A scheduler hangs when its process has not run, or its loop has not come round, for `timeout_s`. A forward pass may
take `FORWARD_TIMEOUTS` times as long, for example a long prefill on a CPU. Leaks: a worker that does not report on
its scheduler (an engine without the overlay) counts as well as long as it answers.
"""

from collections.abc import Iterable, Mapping

import msgspec

from router.events import WorkerUp
from router.models import meant
from router.silence import ActiveClock

INTERVAL_S = 1.0
"""Between two health checks of a worker, and between two decisions."""

REFUSALS = 2
"""Refused connections in a row that make a worker sick."""

FORWARD_TIMEOUTS = 30
"""How many times longer a forward pass may take than anything else."""

HANGS = 2
"""Reports in a row of a hanging scheduler that make a worker sick. One may be false: scheduler and server may have been
paused together, and have just gone on."""


class Scheduler(msgspec.Struct, frozen=True):
    """One scheduler, as its HTTP server sees it. Seconds are of the worker's own clock."""

    ran_s_ago: float
    """Since its process last ran any thread."""
    passed_s_ago: float
    """Since its loop last came round."""
    computes: bool
    """It has since entered a forward pass, or the wait for its results."""

    def hangs(self, timeout_s: float) -> bool:
        """Whether it should have shown a sign of life since."""
        limit_s = timeout_s * FORWARD_TIMEOUTS if self.computes else timeout_s
        return self.ran_s_ago > timeout_s or self.passed_s_ago > limit_s


class Liveness(msgspec.Struct, frozen=True):
    """What a worker with the overlay reports in its answer to `GET /ready`."""

    in_flight: int
    """Requests that its server has not finished."""
    schedulers: tuple[Scheduler, ...]

    @staticmethod
    def read(body: bytes) -> "Liveness | None":
        """The report in an answer; None if there is none, as from another engine."""
        try:
            return msgspec.json.decode(body, type=Liveness)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None


class Watch:
    """The decisions. Times are of one monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s: dict[str, float] = {}
        self._refusals: dict[str, int] = {}
        self._hangs: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._time = ActiveClock(INTERVAL_S + timeout_s / 2)
        self.silent: frozenset[str] = frozenset()

    def is_well(self, worker: str) -> bool:
        return (
            worker not in self.silent
            and worker not in self._leaving
            and self._refusals.get(worker, 0) < REFUSALS
        )

    def is_leaving(self, worker: str) -> bool:
        """Whether it has answered that it takes nothing more: it is about to stop."""
        return worker in self._leaving

    def heard(self, worker: str, now_s: float) -> None:
        self._heard_s[worker] = self._time.look(now_s)

    def hangs(self, worker: str) -> bool:
        """Whether it answers although its scheduler hangs."""
        return self._hangs.get(worker, 0) >= HANGS

    def answered(self, worker: str, ready: bool, now_s: float, liveness: Liveness | None = None) -> None:
        self._heard_s[worker] = self._time.look(now_s)
        self._refusals.pop(worker, None)
        (self._leaving.discard if ready else self._leaving.add)(worker)
        if liveness is None or not any(one.hangs(self._timeout_s) for one in liveness.schedulers):
            self._hangs.pop(worker, None)
        elif liveness.in_flight > 0 or worker in self._hangs:
            self._hangs[worker] = self._hangs.get(worker, 0) + 1
        if not self.hangs(worker):
            self.silent -= {worker}

    def refused(self, worker: str, now_s: float) -> None:
        """It refused a connection, or broke it."""
        self._heard_s[worker] = self._time.look(now_s)  # refusing is not silence
        self._refusals[worker] = self._refusals.get(worker, 0) + 1
        self._hangs.pop(worker, None)
        self.silent -= {worker}

    def decide(self, workers: Iterable[str], now_s: float) -> frozenset[str]:
        """The workers that have fallen silent, or begun to hang, since the last decision. Call it every `INTERVAL_S`.

        A caller that is late by more than half the timeout was itself not running, and that time is nobody's silence.
        """
        now_s = self._time.look(now_s)
        names = set(workers)
        for name in names:
            self._heard_s.setdefault(name, now_s)
        for known in (self._heard_s, self._refusals, self._hangs):
            for name in known.keys() - names:
                del known[name]
        self._leaving &= names
        before = self.silent & names
        self.silent = before | {
            name for name in names if now_s - self._heard_s[name] > self._timeout_s or self.hangs(name)
        }
        return self.silent - before


ASK_AGAIN_S = 60.0
"""A replica may have been replaced by another server at the same address."""


class _Model(msgspec.Struct):
    id: str = ""
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


def models_in(answer: bytes) -> list[_Model]:
    """Those that an answer of `GET /v1/models` names."""
    try:
        return [one for one in msgspec.json.decode(answer, type=_Models).data if one.id]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


class Contexts:
    """How long a prompt may be, by model.

    A replica refuses a prompt that is too long only after its HTTP process has tokenized all of it, and it answers
    nobody meanwhile. So the gateway refuses it first. The longest context of all replicas of the model is the limit,
    because it is not known yet which of them will serve. If any of these does not say, there is no limit, and the
    replicas judge."""

    def __init__(self) -> None:
        self._models: frozenset[str] = frozenset()
        self._limits: dict[str | None, int | None] = {}
        self._answers: dict[tuple[str, str], tuple[float, int]] = {}
        """By name and address of a replica: when it answered, and its longest context; 0: it does not say."""

    def tokens(self, model: str) -> int | None:
        """The limit for prompts of `model`; None if there is none."""
        return self._limits.get(meant(model, self._models))

    def is_due(self, up: WorkerUp, now_s: float) -> bool:
        """Whether to ask it for its models: at once, and now and then."""
        answered_s, _ = self._answers.get((up.worker, up.url), (float("-inf"), 0))
        return now_s - answered_s >= ASK_AGAIN_S

    def answered(self, up: WorkerUp, status: int, body: bytes, now_s: float) -> None:
        found = models_in(body) if status == 200 else ()
        longest = max((one.max_model_len or 0 for one in found), default=0)
        self._answers[up.worker, up.url] = now_s, longest

    def reckon(self, workers: Mapping[str, WorkerUp]) -> None:
        """The limits that follow for these workers."""
        self._models = frozenset(
            model for up in workers.values() for model in (*up.models, up.loaded) if model
        )
        known = {(name, up.url): up for name, up in workers.items()}
        self._answers = {one: answer for one, answer in self._answers.items() if one in known}
        each: dict[str | None, list[int]] = {}
        for one, (_, tokens) in self._answers.items():
            for model in known[one].models or (known[one].loaded,):
                each.setdefault(meant(model, self._models), []).append(tokens)
        self._limits = {model: max(found) if min(found) > 0 else None for model, found in each.items()}
