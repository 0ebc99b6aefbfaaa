"""Who sends what in a measurement of isolation.

A *light* client asks for less than its share: it holds a short conversation now and then, whatever the server does
(open loop). A *victim* has requests running all the time and nothing else. The client beside them, `other`, breaks no
limit: it keeps a number of ordinary requests under way (closed loop), and each kind of them takes the engine from the
others in another way. All prompts are unique. Times are seconds of the engine, lengths tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from workloads.arrivals import EvenArrivals, GammaArrivals
from workloads.clients import Client
from workloads.programs import Codec
from workloads.programs.call import Call, Program
from workloads.programs.kinds import Chat, Turn
from workloads.programs.prose import filler, seeded

LIGHT, VICTIM, OTHER = "light", "victim", "other"

FIRST_WORDS, NEXT_WORDS, ANSWER = 1_000, 100, 32
"""Of a light client's conversation, which has two turns."""
LIGHT_PERIOD_S = 5.0
"""Between two conversations of all light clients together: alone they keep one replica busy for an eighth of the time,
a part of one replica that four hardly feel, so that total throughput stays comparable."""


@dataclass(frozen=True, slots=True)
class Requests:
    """Single requests that one client keeps under way. Lengths are drawn evenly from half to one and a half times the
    mean, so that requests do not march in step; those under way at first are part done."""

    input_tokens: int
    output_tokens: int
    under_way: float
    """At each replica, on average."""
    pause_s: float = 0.0
    """Mean of the exponential pause before each request."""

    def client(self, name: str, codec: Codec, seed: str, *, replicas: int, pace: float = 1.0) -> Client:
        """The client that sends them to so many replicas. `pace` is how many times as long an engine's second takes.

        It counts as not well-behaved, so that nobody waits for its last answers.
        """

        def program(index: int) -> Program:
            rng = seeded(seed, name, "request", index)
            of_input, of_output = rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5)
            if index < replicas * self.under_way:
                of_output *= rng.random()
            prompt = filler(f"{seed}/{name}/{index}", codec, round(self.input_tokens * of_input))
            output_tokens = max(1, round(self.output_tokens * of_output)) if self.output_tokens > 1 else 1
            pause_s = rng.expovariate(1 / (self.pause_s * pace)) if self.pause_s else 0.0
            yield Call(prompt, output_tokens, name, after_s=pause_s)

        arrivals = GammaArrivals(1.0)  # unused: a closed loop
        return Client(name, program, arrivals, seed, name, well_behaved=False, requests=1)


RUNNING = Requests(64, 1_024, 24)
"""A victim's: they do nothing but decode."""

TRICKLE = "prefill-trickle"
MIDDLE = Requests(512, 256, 250)
ATTACKS: Mapping[str, Requests] = {
    TRICKLE: Requests(40, 1, 8, pause_s=0.002),
    "long-prompts": Requests(8_000, 16, 16),
    "many-short": Requests(200, 32, 100),
    "long-outputs": Requests(256, 2_048, 100),
    "1000-concurrent": MIDDLE,
}
"""What `other` keeps under way."""
FLOOD = "flood-"
"""`flood-N` is N requests of middle length, for four replicas."""


def find_attack(name: str) -> Requests:
    """One of `ATTACKS`, or a flood. Raises ValueError for any other name."""
    if name in ATTACKS:
        return ATTACKS[name]
    count = name.removeprefix(FLOOD)
    if count == name or not count.isdecimal() or not int(count):
        raise ValueError(f"no attack {name!r}; there are {', '.join(ATTACKS)} and {FLOOD}N")
    return replace(MIDDLE, under_way=int(count) / 4)


def light_clients(
    count: int, codec: Codec, seed: str, *, period_s: float = LIGHT_PERIOD_S, pace: float = 1.0
) -> tuple[Client, ...]:
    """`light-0`, `light-1`, ..., which begin their conversations in turn. `pace` is how many times as long an engine's
    second takes."""
    turns = (FIRST_WORDS, NEXT_WORDS)

    def client(number: int) -> Client:
        name = f"{LIGHT}-{number}"

        def program(index: int) -> Program:
            words = [
                filler(f"{seed}/{name}/{index}/{turn}", codec, tokens) for turn, tokens in enumerate(turns)
            ]
            return Chat().program([Turn(word, ANSWER) for word in words], codec)

        every_s = period_s * pace
        arrivals = EvenArrivals(1 / (every_s * count), first_s=every_s * (number + 0.5))
        return Client(name, program, arrivals, seed, LIGHT, requests=len(turns))

    return tuple(client(number) for number in range(count))


@dataclass(frozen=True, slots=True)
class Scene:
    """Who is there in one run."""

    attack: str | None = None
    light: int = 0
    victim: bool = False

    @property
    def clients(self) -> int:
        return self.light + self.victim + (self.attack is not None)

    @property
    def name(self) -> str:
        """Such as `light-1+long-prompts`; part of a file's name."""
        light = f"{LIGHT}-{self.light}" if self.light else ""
        return "+".join(part for part in (light, VICTIM if self.victim else "", self.attack) if part)

    def load(
        self, codec: Codec, seed: str, *, replicas: int, period_s: float = LIGHT_PERIOD_S, pace: float = 1.0
    ) -> tuple[tuple[Client, ...], dict[str, int]]:
        """The clients, and how many requests those of the closed loop keep under way."""
        closed = {VICTIM: RUNNING} if self.victim else {}
        if self.attack is not None:
            closed[OTHER] = find_attack(self.attack)
        others = (
            requests.client(name, codec, seed, replicas=replicas, pace=pace)
            for name, requests in closed.items()
        )
        light = light_clients(self.light, codec, seed, period_s=period_s, pace=pace)
        return (*light, *others), {name: round(replicas * one.under_way) for name, one in closed.items()}


def scenes(attacks: Sequence[str], light: int) -> tuple[Scene, ...]:
    """All runs that the rows of these attacks need, for one stack. The victim meets the trickle alone."""
    found = [Scene(light=light)]
    for attack in attacks:
        if attack == TRICKLE:
            found += [Scene(victim=True), Scene(attack, victim=True)]
        found += [Scene(attack), Scene(attack, light)]
    return tuple(found)
