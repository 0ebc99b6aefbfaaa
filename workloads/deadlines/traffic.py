"""Requests with deadlines: streams of one model and class each, Poisson arrivals, lengths like ShareGPT's.

Prompts have 161 tokens on average and answers 338, as vLLM's paper (Kwon et al., SOSP 2023) counts ShareGPT; both are
log-normal and cut at 2,048. Nobody knows an answer's length before. Classes are those of QLM: 20 s, a minute, an hour
to the first token.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import exp, inf, log
from random import Random
from typing import Any

import numpy as np

from sglang_fair.common.deadlines import DEFAULT_CLASSES

LONGEST_TOKENS = 2048
PROMPT_MEAN, PROMPT_SIGMA = 161.0, 1.0
OUTPUT_MEAN, OUTPUT_SIGMA = 338.0, 0.9
MEGA_TOKENS = (3000, 4000)
"""Prompt and answer together of a mega prompt."""
VOCABULARY = 30_000
NEXT_TOKENS = 60
"""What the next call of an interaction says, beyond what was said before."""
THINK_S = 2.0
"""From an answer to the next call."""


@dataclass(frozen=True)
class Asked:
    """One request. `prefix` names what it shares with others, of which it has the first `prefix_tokens`."""

    id: str
    at_s: float
    client: str
    model: str
    slo_class: str
    slo_s: float
    prompt_tokens: int
    output_tokens: int
    most_tokens: int = LONGEST_TOKENS
    prefix: str = ""
    prefix_tokens: int = 0
    interaction: str = ""
    call: int = 1
    calls: int = 1
    """Of its interaction: its number, and how many there are. Each follows the answer to the one before."""
    before: bytes = b""
    """The beginning of its prompt: what the calls before said."""

    @property
    def due_s(self) -> float:
        """By when its first token is promised."""
        return self.at_s + self.slo_s

    @cached_property
    def tokens(self) -> bytes:
        """Its prompt: random tokens, the same in every run."""
        if self.before:
            return self.before + _random(self.id, self.prompt_tokens - len(self.before) // 4)
        shared = min(self.prefix_tokens, self.prompt_tokens) if self.prefix else 0
        return _random(self.prefix, shared) + _random(self.id, self.prompt_tokens - shared)

    def following(self, at_s: float, answer: bytes) -> "Asked":
        """The next call of its interaction, after its answer."""
        before = self.tokens + answer
        return replace(
            self,
            id=f"{self.id}+",
            at_s=at_s,
            call=self.call + 1,
            before=before,
            prompt_tokens=len(before) // 4 + NEXT_TOKENS,
        )


def _random(name: str, tokens: int) -> bytes:
    if not tokens:
        return b""
    drawn = np.random.Generator(np.random.PCG64(list(name.encode()))).integers(
        0, VOCABULARY, tokens, dtype="<u4"
    )
    return drawn.tobytes()


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one model and class. `rate_per_s` from `from_s` on, until `until_s` or until there are `count`."""

    model: str
    slo_class: str
    rate_per_s: float
    from_s: float = 0.0
    until_s: float = inf
    count: int | None = None
    client: str = ""
    slo_s: float | None = None
    prompts: float = 1.0
    outputs: float = 1.0
    """Lengths in multiples of ShareGPT's."""
    mega: float = 0.0
    """Part of them that are mega prompts."""
    prefixes: int = 0
    """So many prefixes are shared among them, drawn at random; 0: none is."""
    prefix_tokens: int = 0
    calls: int = 1
    """Of each interaction."""

    @property
    def name(self) -> str:
        return self.client or f"{self.slo_class}:{self.model}"

    def to_json(self) -> dict[str, Any]:
        """With null for no end."""
        return asdict(self) | {"until_s": None if self.until_s == inf else self.until_s}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Stream":
        """The inverse of `to_json`."""
        known = dict(values)
        if known.get("until_s") is None:
            known.pop("until_s", None)
        return cls(**known)


def length(rng: Random, mean: float, sigma: float, longest: int = LONGEST_TOKENS) -> int:
    """Log-normal with this mean before it is cut."""
    mu = log(mean) - sigma * sigma / 2
    return max(1, min(longest, round(exp(rng.gauss(mu, sigma)))))


def requests(streams: Iterable[Stream], seed: str, *, most: int | None = None) -> list[Asked]:
    """All requests in order of time; `most`: the first so many. A stream's own draws depend on nothing else."""
    found = [
        asked for number, stream in enumerate(streams) for asked in _of(stream, f"{seed} {number}", most)
    ]
    return sorted(found, key=lambda asked: (asked.at_s, asked.id))[:most]


def _of(stream: Stream, seed: str, most: int | None) -> Sequence[Asked]:
    if stream.rate_per_s <= 0:
        return []
    rng, at_s = Random(seed), stream.from_s
    slo_s = DEFAULT_CLASSES[stream.slo_class] if stream.slo_s is None else stream.slo_s
    count = min(one for one in (stream.count, most, 10**6) if one is not None)
    found = []
    for number in range(count):
        at_s += rng.expovariate(stream.rate_per_s)
        prompt = length(
            rng, stream.prompts * PROMPT_MEAN, PROMPT_SIGMA, round(LONGEST_TOKENS * max(1, stream.prompts))
        )
        output = length(rng, stream.outputs * OUTPUT_MEAN, OUTPUT_SIGMA)
        if rng.random() < stream.mega:
            whole = rng.randint(*MEGA_TOKENS)
            output = min(LONGEST_TOKENS, round(whole * rng.uniform(0.3, 0.5)))
            prompt = whole - output
        if at_s > stream.until_s:
            break
        prefix = f"{stream.name} prefix {rng.randrange(stream.prefixes)}" if stream.prefixes else ""
        found.append(
            Asked(
                f"{stream.name}#{seed}#{number:06d}",
                at_s,
                stream.name,
                stream.model,
                stream.slo_class,
                slo_s,
                prompt + (stream.prefix_tokens if prefix else 0),
                output,
                prefix=prefix,
                prefix_tokens=stream.prefix_tokens if prefix else 0,
                interaction=f"{stream.name}#{number}" if stream.calls > 1 else "",
                calls=stream.calls,
            )
        )
    return found
