"""An algorithm as its paper has it, with lists, beside ours: the same random events, and the same picks."""

from dataclasses import dataclass, field
from random import Random

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


class Twins:
    """Both, given the same legal events; they must agree on every pick, and on the counters after every event."""

    def __init__(self, fast: Policy, slow: Literal, seed: int, *, clients: str = "abcd", holds: bool = False):
        self.fast, self.slow = fast, slow
        self.random, self.clients, self.holds = Random(seed), clients, holds
        self.running: list[str] = []
        self.arrivals = 0
        self.now_s = 0.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        random, slow = self.random, self.slow
        self.now_s += random.choice([0, 0, 0.5, 3, 20])
        self._both("tick", self.now_s)
        event = random.choice(
            ["arrive"] * 4 + ["admit"] * 5 + ["output"] * 3 + ["end", "end", "abort", "rematch"]
        )
        event = random.choice([event] * 3 + ["hold", "release"]) if self.holds else event
        if event == "arrive":
            self.arrivals += 1
            job = Job(str(self.arrivals), random.choice(self.clients), arrival=self.arrivals)
            job.prefix_tokens = random.randrange(4)
            accepted = slow.accepts(job)
            assert (self.fast.refuses(job) is None) == accepted
            if accepted:
                self._both("arrive", job)
        elif event in ("admit", "hold"):
            self._admit_or_hold(event)
        elif event == "output" and self.running:
            self._both("charge", random.choice(self.running), random.randint(1, 8))
        elif event == "end" and self.running:
            self._gone(self.running.pop(random.randrange(len(self.running))))
        elif event == "abort" and slow.waiting:
            job = random.choice(slow.waiting)
            self._both("leave", job)
            self._gone(job.client)
        elif event == "rematch" and slow.waiting:
            job = random.choice(slow.waiting)
            job.prefix_tokens = random.randrange(4)
            self.fast.rematch(job)
        elif event == "release":
            slow.held.clear()
            self.fast.release()
        assert slow.agrees_with(self.fast)

    def _admit_or_hold(self, event: str) -> None:
        expected = self.slow.pick()
        assert self.fast.pick() is expected
        assert self.fast.pick() is expected
        if expected is None:
            return
        if event == "hold":
            self.slow.held.append(expected)
            self.fast.hold(expected)
            return
        self._both("leave", expected)
        self.running.append(expected.client)
        self._both("charge", expected.client, self.random.randint(1, 30))
        self._both("admitted", expected)

    def _gone(self, client: str) -> None:
        if client not in self.running and all(job.client != client for job in self.slow.waiting):
            self._both("idle", client)

    def _both(self, event: str, *arguments: object) -> None:
        getattr(self.slow, event)(*arguments)
        getattr(self.fast, event)(*arguments)
