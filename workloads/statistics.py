"""Statistics of programs, independent of any engine: those of DLPM's Table 2.

Programs run one after another with made-up answers that share nothing; calls are answered in the order in which they
become ready. "Prefix" can be read in two ways, so there are two averages: what all requests of a program have in common
(the document, the question, the article), and what a request shares with any one before it, answer included, which is
what a cache that forgets nothing would save.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from string import ascii_lowercase

import numpy as np

from workloads.programs.call import Call, Execution, Program, Prompt, Reply
from workloads.programs.codec import TOKEN_BYTES, TextCodec
from workloads.programs.prose import seeded

_CHARS_PER_TOKEN = TextCodec().chars_per_token


@dataclass(frozen=True, slots=True)
class Statistics:
    """Averages over requests, but `common_tokens`, which is one over programs. In tokens."""

    programs: int
    requests: int
    prompt_tokens: float
    common_tokens: float
    """Longest prefix of all requests of a program; of a program with one request, its prompt."""
    shared_tokens: float
    """Longest prefix that is also one of an earlier request, of this program or another, with its answer."""
    output_tokens: float

    @property
    def requests_per_program(self) -> float:
        return self.requests / self.programs

    @property
    def hit_rate(self) -> float:
        """The part of all prompt tokens that is shared: an upper bound for every cache."""
        return self.shared_tokens / self.prompt_tokens


def statistics(programs: Iterable[Program]) -> Statistics:
    """Run `programs` to their end. Tokens of text are estimated (`TextCodec`). Holds all prompts in memory.

    Raises ValueError where there is no request.
    """
    seen: list[bytes] = []
    common: list[float] = []
    prompts = shared = output = 0.0
    for program in programs:
        prefix: bytes | None = None
        execution = Execution(program)
        ready = execution.start()
        while ready:
            number, call = ready.pop(0)
            prompt, per_token = _units(call.prompt)
            reply = _answer(len(seen), call)
            prompts += len(prompt) / per_token
            shared += _longest(seen, prompt) / per_token
            output += call.max_output_tokens
            prefix = prompt if prefix is None else prefix[: _agreeing(prefix, prompt)]
            insort(seen, prompt + reply.packed)
            ready += execution.reply(number, reply)
        if prefix is not None:
            common.append(len(prefix) / per_token)
    if not seen:
        raise ValueError("there are no requests to tell anything about")
    requests = len(seen)
    return Statistics(
        programs=len(common),
        requests=requests,
        prompt_tokens=prompts / requests,
        common_tokens=sum(common) / len(common),
        shared_tokens=shared / requests,
        output_tokens=output / requests,
    )


def _units(prompt: Prompt) -> tuple[bytes, float]:
    """A prompt as four bytes for each character or token, and how many bytes are a token."""
    if isinstance(prompt, str):
        return prompt.encode("utf-32-le"), TOKEN_BYTES * _CHARS_PER_TOKEN
    return (prompt if isinstance(prompt, bytes) else array("I", prompt).tobytes()), TOKEN_BYTES


def _answer(number: int, call: Call) -> Reply:
    """As long as the call says, and unlike any other."""
    tokens = call.max_output_tokens
    chars = round(tokens * _CHARS_PER_TOKEN) if isinstance(call.prompt, str) else tokens
    text = "".join(seeded("answer", number).choices(ascii_lowercase, k=chars))
    return Reply(text, tuple(text.encode()), packed=text.encode("utf-32-le"))


def _longest(seen: list[bytes], prompt: bytes) -> int:
    """Bytes that `prompt` shares with one of `seen`, which are sorted: one of its neighbours shares most."""
    place = bisect_left(seen, prompt)
    return max((_agreeing(other, prompt) for other in seen[max(0, place - 1) : place + 1]), default=0)


def _agreeing(one: bytes, other: bytes) -> int:
    """Leading bytes that two have in common, in whole units."""
    units = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, "<u4", units) != np.frombuffer(other, "<u4", units)
    return TOKEN_BYTES * (int(differ.argmax()) if differ.any() else units)
