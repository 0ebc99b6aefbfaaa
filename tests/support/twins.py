"""Random legal calls to a policy; and an algorithm as its paper has it, with lists, beside ours: the same picks."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from sglang_fair.core.job import Job
from sglang_fair.core.policy import Policy


@dataclass
class Literal:
    """A listing, transcribed. A held request still waits and is not picked."""

    waiting: list[Job] = field(default_factory=list)
    held: list[Job] = field(default_factory=list)

    def tick(self, now_s: float) -> None:
        """It is `now_s`."""

    def accepts(self, job: Job) -> bool:
        return True

    def arrive(self, job: Job) -> None:
        self.waiting.append(job)

    def leave(self, job: Job) -> None:
        self.waiting.remove(job)
        self.held = [other for other in self.held if other is not job]

    def hold(self, job: Job) -> None:
        self.held.append(job)

    def release(self) -> None:
        self.held.clear()

    def rematch(self, job: Job) -> None:
        """Its prefix has another length."""

    def pick(self) -> Job | None:
        raise NotImplementedError

    def charge(self, client: str, units: int) -> None:
        raise NotImplementedError

    def admitted(self, job: Job) -> None:
        """`job` was admitted and charged."""

    def idle(self, client: str) -> None:
        """Nothing of `client` is here any more."""

    def agrees_with(self, policy: Policy) -> bool:
        """The counters that `policy` shows are those of the listing."""
        raise NotImplementedError


@dataclass
class Both:
    """They must agree on every pick, and on the counters after every event."""

    fast: Policy
    slow: Literal

    def refuses(self, job: Job) -> str | None:
        refusal = self.fast.refuses(job)
        assert (refusal is None) == self.slow.accepts(job)
        return refusal

    def pick(self) -> Job | None:
        expected = self.slow.pick()
        assert self.fast.pick() is expected
        assert self.slow.agrees_with(self.fast)
        return expected

    def __getattr__(self, event: str) -> Any:
        def happens(*arguments: object) -> None:
            getattr(self.slow, event)(*arguments)
            getattr(self.fast, event)(*arguments)
            assert self.slow.agrees_with(self.fast)

        return happens


class Script:
    """Random legal calls to one policy, and what it must still know. `rename` says what clients are called, and
    `delays` that it may offer nobody although requests wait.

    `before_pick` is a second caller's noise, right before each pick.
    """

    def __init__(
        self,
        policy: "Policy | Both",
        seed: int,
        *,
        clients: str = "abcd",
        holds: bool = True,
        delays: bool = False,
        rename: Callable[[str], str] = str,
        before_pick: Callable[["Script"], None] | None = None,
        sessions: int = 0,
    ) -> None:
        """`sessions`: how many each client names; 0: none."""
        self.policy, self.random, self.holds, self.rename = policy, Random(seed), holds, rename
        self.clients, self.delays, self.before_pick = clients, delays, before_pick
        self.sessions = sessions
        self.waiting: dict[int, Job] = {}
        self.held: list[Job] = []
        self.running: list[Job] = []
        self.arrivals = 0
        self.now_s = 0.0
        self.picks: list[int | None] = []

    def run(self, steps: int = 80) -> "Script":
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        random = self.random
        self.now_s += random.choice([0, 0, 0.5, 3, 20])
        self.policy.tick(self.now_s)
        event = random.choice(
            ["arrive"] * 4 + ["admit"] * 5 + ["output"] * 3 + ["end", "end", "abort", "rematch"]
        )
        event = random.choice([event] * 3 + ["hold", "release"]) if self.holds else event
        if event == "arrive":
            self.arrive(random.choice(self.clients), random.randrange(4))
        elif event in ("admit", "hold"):
            job = self.pick()
            if job is not None and event == "hold":
                self.hold(job)
            elif job is not None:
                self.admit(job, random.randint(1, 30))
        elif event == "output" and self.running:
            self.policy.charge(random.choice(self.running).client, random.randint(1, 9))
        elif event == "end" and self.running:
            job = self.running.pop(random.randrange(len(self.running)))
            self.tell_if_idle(job.client)
        elif event == "abort" and self.waiting:
            self.abort(random.choice(list(self.waiting.values())))
        elif event == "rematch" and self.waiting:
            job = random.choice(list(self.waiting.values()))
            job.prefix_tokens = random.randrange(4)
            self.policy.rematch(job)
        elif event == "release":
            self.release()

    def arrive(self, client: str, prefix_tokens: int = 0) -> Job:
        self.arrivals += 1
        job = Job(
            f"id{self.arrivals}", self.rename(client), arrival=self.arrivals, prefix_tokens=prefix_tokens
        )
        job.prompt_tokens = prefix_tokens + 2
        if self.sessions:
            job.session = f"s{self.arrivals % self.sessions}"
        if self.policy.refuses(job) is None:
            self.waiting[job.arrival] = job
            self.policy.arrive(job)
        return job

    def pick(self) -> Job | None:
        """Checks what is true of every pick."""
        if self.before_pick is not None and not self.held:
            self.before_pick(self)
        job = self.policy.pick()
        assert self.policy.pick() is job, "a second look changed the answer"
        if job is not None:
            assert self.waiting.get(job.arrival) is job
            assert job not in self.held
        elif not self.held and not self.delays:
            assert not self.waiting, "requests wait, none is held, and none is offered"
        self.picks.append(None if job is None else job.arrival)
        return job

    def hold(self, job: Job) -> None:
        self.held.append(job)
        self.policy.hold(job)

    def release(self) -> None:
        self.held.clear()
        self.policy.release()

    def admit(self, job: Job, units: int) -> None:
        self._drop(job)
        self.policy.charge(job.client, units)
        job.cached_tokens = job.prefix_tokens
        self.policy.admitted(job)
        self.running.append(job)

    def abort(self, job: Job) -> None:
        self._drop(job)
        self.tell_if_idle(job.client)

    def tell_if_idle(self, client: str) -> None:
        if all(job.client != client for job in (*self.waiting.values(), *self.running)):
            self.policy.idle(client)

    def _drop(self, job: Job) -> None:
        del self.waiting[job.arrival]
        self.held = [other for other in self.held if other is not job]
        self.policy.leave(job)
