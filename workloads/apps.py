"""Applications and their users, as FairServe's study has them: who sends which interactions, and how often.

An interaction is a plan, calls that run side by side, and a merge, whose answer the user sees; one of a single call is
that answer. Sizes are those of the paper's Table 2, whose tokens are of a whole graph: an interaction of two to ten
calls has 21,352 input tokens, about 5,000 a call. Lengths of three applications are Table 4's. What the paper does not
say is assumed: an application's calls begin with a system prompt of its own, half of the shortest call; lengths are
log-normal; the mean rates of users are log-normal.
"""

from dataclasses import dataclass
from math import exp
from random import Random

from workloads.arrivals import Arrivals, GammaArrivals, PhasedArrivals
from workloads.clients import Client
from workloads.programs import Call, Program, Reply
from workloads.programs.codec import TOKEN_BYTES
from workloads.programs.prose import seeded

LENGTH_SPREAD = 0.3
"""Standard deviation of the logarithm of a call's input and output."""

OUTPUT_PRICE = 2.0

RARER = 0.75
"""An interaction of one call more is so many times as frequent: 4.3 calls on average, of those that have 2 to 10."""


def service(prompt_tokens: float, output_tokens: float) -> float:
    """Plain service, by the prices of all policies here; cached tokens count as others do."""
    return prompt_tokens + OUTPUT_PRICE * output_tokens


@dataclass(frozen=True, slots=True)
class App:
    """An application: the calls of its interactions, and their lengths in tokens. `share` is its part of the users."""

    name: str
    share: float
    input_tokens: float
    """Of one call, on average; the system prompt is part of it."""
    output_tokens: float
    calls: tuple[int, int] = (1, 1)
    """Fewest and most of an interaction."""
    system_tokens: int = 0
    """All calls of the application begin with these."""

    @property
    def normal_cost(self) -> float:
        """Of an average call, in plain service."""
        return service(self.input_tokens, self.output_tokens)

    def size(self, rng: Random) -> int:
        """Calls of one interaction."""
        sizes = range(self.calls[0], self.calls[1] + 1)
        return rng.choices(sizes, [RARER**size for size in sizes])[0]

    def interaction(self, rng: Random) -> Program:
        """One interaction. Returns whether its user got the answer; a call that fails ends it."""
        size = self.size(rng)
        if size > 1:
            plan: Reply = yield self.call(rng, "plan")
            if not plan.ok:
                return False
        if size > 2:
            replies: tuple[Reply, ...] = yield tuple(self.call(rng, "work") for _ in range(size - 2))
            if not all(reply.ok for reply in replies):
                return False
        answer: Reply = yield self.call(rng, "merge" if size > 1 else "single", last=True)
        return answer.ok

    def call(self, rng: Random, stage: str, *, last: bool = False) -> Call:
        """One call, which is drawn anew each time."""
        own = max(1, _drawn(rng, self.input_tokens) - self.system_tokens)
        prompt = self._system() + rng.randbytes(TOKEN_BYTES * own)
        return Call(
            prompt, _drawn(rng, self.output_tokens), stage, last=last, system_tokens=self.system_tokens
        )

    def _system(self) -> bytes:
        return Random(self.name).randbytes(TOKEN_BYTES * self.system_tokens)


APPS: tuple[App, ...] = (
    App("chat", 0.30, 4995, 137, system_tokens=512),
    App("app14", 0.14, 6370, 102, system_tokens=512),
    App("app7", 0.10, 14854, 74, system_tokens=512),
    App("app12", 0.19, 999, 32, system_tokens=512),
    App("agent", 0.262, 21352 / 4.3, 241 / 4.3, (2, 10), 512),
    App("research", 0.008, 51200 / 15, 3259 / 15, (11, 20), 512),
)
"""Table 2's shares are of interactions: three in four are of one call."""

BY_NAME = {app.name: app for app in APPS}


@dataclass(frozen=True, slots=True)
class Crowd:
    """Users and abusers. Rates are in interactions a minute.

    `users` have log-normal mean rates, with this median and spread of the logarithm. In the part `surge` of the time,
    in the middle of the run, all of them together send `surge_factor` times as much: the overload. `abusers` send
    single calls of `abused`, one as often as `least_abuse` and the most eager one `most_abuse`, all the time.
    """

    users: int = 1000
    median_rpm: float = 0.05
    spread: float = 1.2
    abusers: int = 5
    least_abuse: float = 100.0
    most_abuse: float = 1000.0
    abused: str = "app12"
    surge: float = 0.1
    surge_factor: float = 10.0

    def clients(self, seed: str, duration_s: float) -> tuple[Client, ...]:
        """Each with one application."""
        rng = seeded(seed, "crowd")
        made = []
        for number in range(self.users):
            app = rng.choices(APPS, [app.share for app in APPS])[0]
            rpm = self.median_rpm * exp(rng.gauss(0.0, self.spread))
            made.append(client(f"user{number}", app, self._surging(rpm, duration_s), seed))
        for number, rpm in enumerate(self.abuse()):
            arrivals = GammaArrivals(rpm / 60)
            made.append(client(f"abuser{number}", BY_NAME[self.abused], arrivals, seed, well_behaved=False))
        return tuple(made)

    def abuse(self) -> list[float]:
        """The abusers' rates, in equal steps of their logarithm."""
        steps = max(1, self.abusers - 1)
        ratio = self.most_abuse / self.least_abuse
        return [self.least_abuse * ratio ** (number / steps) for number in range(self.abusers)]

    def _surging(self, rpm: float, duration_s: float) -> Arrivals:
        usual, more = GammaArrivals(rpm / 60), GammaArrivals(self.surge_factor * rpm / 60)
        if self.surge >= 1:
            return more
        if not self.surge:
            return usual
        before_s = duration_s * (1 - self.surge) / 2
        return PhasedArrivals(
            [(usual, before_s), (more, duration_s * self.surge), (usual, duration_s - before_s)]
        )


def client(name: str, app: App, arrivals: Arrivals, seed: str, *, well_behaved: bool = True) -> Client:
    """A user of one application. Its k-th interaction depends on (seed, name, k) alone."""

    def program(index: int) -> Program:
        return app.interaction(seeded(seed, name, "interaction", index))

    return Client(name, program, arrivals, seed, app=app.name, well_behaved=well_behaved)


def _drawn(rng: Random, mean: float) -> int:
    return max(1, round(mean * exp(rng.gauss(0.0, LENGTH_SPREAD) - LENGTH_SPREAD**2 / 2)))
