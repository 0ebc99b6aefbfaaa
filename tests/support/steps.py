"""The rule of steps, driven by clients' names: whatever one does, it does with the next of its requests. And an engine
that takes each request which it is offered, with clients of all habits."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Self

from sglang_fair.core.admission import Admission
from sglang_fair.core.interactions import Interaction, Interactions
from sglang_fair.core.job import Job
from sglang_fair.core.ledger import SYSTEM
from sglang_fair.core.policy import Policy
from sglang_fair.core.queue import FairQueue
from sglang_fair.core.steps import Steps
from sglang_fair.core.waits import BATCH


@dataclass(frozen=True)
class Sender:
    """One client's habit: it keeps `waiting` requests waiting, and `under_way` waiting or running at most."""

    name: str = ""
    waiting: int = 1
    under_way: int = 10**6
    weight: float = 1.0
    names: int = 1
    """Its requests come under so many names in turn; 0: each under a new one."""
    prompt: tuple[int, int] = (5, 5)
    output: tuple[int, int] = (1, 40)
    sends: float = 1.0
    """With this probability it sends one more, while it may."""
    aborts: float = 0.0
    """In each step, for each of its requests, whether it waits or runs."""
    calls: int = 1
    """Its requests are calls of interactions of so many, of which `open` are open."""
    open: int = 1
    app: str = "chat"
    label: str = ""
    """What it says its app is; "" for the truth."""
    comes: int = 0
    stays: int = 0
    leaves: int = 0
    """From step `comes` on it sends for `stays` steps and sends nothing for `leaves`, again and again. If it `stays` 0,
    it sends in all of them."""

    def is_here(self, step: int) -> bool:
        since = step - self.comes
        return since >= 0 and (not self.stays or since % (self.stays + self.leaves) < self.stays)

    def client(self, number: int) -> str:
        if self.names == 1:
            return self.name
        return f"{self.name}.{number % self.names if self.names else number}"


class Engine:
    """Runs `most` requests at a time. Prompts take no time, and a step gives a token to each that runs."""

    def __init__(
        self,
        senders: list[Sender],
        policy: Policy,
        rule: Steps | None = None,
        *,
        seed: int = 0,
        most: int = 10**6,
        retracts: float = 0.0,
        step_s: Callable[[int], float] = lambda requests: 1.0,
    ) -> None:
        self.senders, self.most, self.retracts, self.step_s = senders, most, retracts, step_s
        self.random = Random(seed)
        self.queue = FairQueue(policy)
        self.admission = Admission(self.queue, lambda job: (0, None), rule)
        self.interactions = Interactions(most_calls=10**6, most_open=10**6)
        self.waiting: dict[str, Job] = {}
        self.running: dict[str, Job] = {}
        self.left: dict[str, int] = {}
        """Tokens that each has yet to make."""
        self.sent_by: dict[str, Sender] = {}
        self.now_s = 0.0
        self.steps = 0
        self.sent = 0

    def run(self, steps: int) -> Self:
        for _ in range(steps):
            self.step()
        return self

    def step(self) -> None:
        self.begin()
        if batch := self.form():
            self.admission.computed(batch)
        self.decode()

    def begin(self) -> None:
        self.steps += 1
        self.admission.tick(self.now_s)
        self.interactions.tick(self.now_s)
        for sender in self.senders:
            self.send(sender)

    def send(self, sender: Sender) -> None:
        here = sender.is_here(self.steps)
        mine, run = (sum(self.sent_by[id] is sender for id in ids) for ids in (self.waiting, self.running))
        while (
            here
            and mine < sender.waiting
            and mine + run < sender.under_way
            and self.random.random() < sender.sends
        ):
            mine += 1
            self.sent += 1
            id, output = str(self.sent), self.random.randint(*sender.output)
            job = Job(
                id, sender.client(self.sent), self.random.randint(*sender.prompt), max(1, output),
                app=sender.label or sender.app, arrived_s=self.now_s,
            )  # fmt: skip
            if sender.calls > 1:
                job.interaction = str(self.random.randrange(sender.open))
                job.call = self.interactions.accept(self.name(job, sender))
            self.left[id], self.sent_by[id], self.waiting[id] = output, sender, job
            self.admission.arrive(job)
        if sender.aborts:
            for job in [*self.waiting.values(), *self.running.values()]:
                if self.sent_by[job.id] is sender and self.random.random() < sender.aborts:
                    self.end(job)

    @staticmethod
    def name(job: Job, sender: Sender) -> Interaction:
        return Interaction(job.client, sender.app, job.interaction)

    def form(self, most: int = 10**6) -> list[Job]:
        """The prompts of this step, `most` at most."""
        self.admission.begin_pass(self.sent, lambda: bool(self.running))
        room = min(most, self.most - len(self.running))
        batch, candidates = list[Job](), self.admission.candidates()
        while len(batch) < room and (job := next(candidates, None)) is not None:
            self.admit(job)
            batch.append(job)
        self.admission.end_pass(BATCH if len(self.running) >= self.most else None)
        if len(batch) < room:
            self.passed_over()
        return batch

    def admit(self, job: Job) -> None:
        self.admission.admit(job, extend_tokens=job.prompt_tokens, cached_tokens=0)
        self.running[job.id] = self.waiting.pop(job.id)

    def passed_over(self) -> None:
        """There is room, and no other request is offered."""

    def decode(self) -> None:
        assert self.running or not self.waiting, "the engine would stand still although a request waits"
        length_s, requests = self.step_s(len(self.running)), len(self.running)
        self.now_s += length_s
        if requests:
            self.admission.step(length_s, decoded=1, requests=requests)
        for job in list(self.running.values()):
            self.emit(job)
            if not self.left[job.id]:
                self.end(job)
            elif self.random.random() < self.retracts:
                self.waiting[job.id] = self.running.pop(job.id)
                self.admission.retract(job)

    def emit(self, job: Job) -> None:
        self.queue.account.emit(job, 1)
        self.left[job.id] -= 1

    def end(self, job: Job) -> None:
        if self.waiting.pop(job.id, None) is not None:
            self.admission.leave(job)
        else:
            self.running.pop(job.id, None)
            self.admission.finish(job)
        sender, left = self.sent_by.pop(job.id), self.left.pop(job.id)
        if sender.calls > 1:
            self.interactions.end(self.name(job, sender), is_answered=not left and job.call >= sender.calls)

    def count(self, name: str) -> int:
        """Requests of clients whose names begin so that run."""
        return sum(job.client.startswith(name) for job in self.running.values())

    def by_client(self) -> Counter[str]:
        """Requests that run."""
        return Counter(job.client for job in self.running.values())


class Clients(Steps):
    """`Steps` of clients whose requests have no names."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self._waiting: defaultdict[str, list[Job]] = defaultdict(list)
        self._runs: defaultdict[str, list[Job]] = defaultdict(list)

    def come(self, *clients: str, waited_s: float = 0.0) -> None:
        """`waited_s`: so long ago."""
        for client in clients:
            self._waiting[client].append(job := Job("", client, arrived_s=self._now_s - waited_s))
            self.arrive(job)

    def go(self, client: str) -> None:
        """One that waits is given up."""
        self.leave(self._waiting[client].pop())

    def begin(self, *clients: str) -> None:
        for client in clients:
            self._runs[client].append(job := self._waiting[client].pop())
            self.admit(job)

    def decode(self, *clients: str) -> None:
        self.begin(*clients)
        for client in clients:
            self.computed(self._runs[client][-1])

    def again(self, client: str) -> None:
        """One that runs waits again."""
        self._waiting[client].append(job := self._runs[client].pop())
        self.retract(job)

    def end(self, client: str) -> None:
        self.finish(self._runs[client].pop(), "finished")

    def may(self, client: str) -> bool:
        return self.may_prefill(Job("", client, system=client == SYSTEM))

    def holds(self, client: str) -> bool:
        return self.holds_back(Job("", client))
