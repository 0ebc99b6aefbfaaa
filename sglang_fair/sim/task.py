"""A request inside a simulated replica."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from sglang_fair.core.admission import block_of
from sglang_fair.core.job import Job
from sglang_fair.sim.answers import TOKEN_BYTES, answer
from sglang_fair.sim.cache import Node
from sglang_fair.sim.events import SimRequest


@dataclass(slots=True, eq=False)
class Task:
    """A request from its arrival to its end: where its tokens are, and how far it is."""

    request: SimRequest
    job: Job
    prompt_tokens: int
    output_limit: int
    """Tokens of its answer."""
    tokens: bytes
    """What has to be computed before it decodes: its prompt; after a retraction with its output so far."""
    length: int
    """Number of `tokens`."""
    found: Node | None = None
    """The end of its cached prefix as last looked up."""
    node: Node | None = None
    """The end of what it has locked in the cache."""
    start: int = 0
    computed: int = 0
    """`tokens` from `start` to `computed` are computed in the step under way; those before are in the pool."""
    loaded: int = 0
    """Of these, the first so many come from the host."""
    output: int = 0
    """Output tokens when it joined the decode batch, at step number `joined`."""
    joined: int = 0
    place: int = 0
    """Number in order of joining the decode batch; 0 outside."""
    last_step: int = 0
    """The decode step after which it ends."""
    aborted: bool = False
    answer: bytes | None = None
    """All of it; None until it is needed."""
    prompt: memoryview = field(init=False)
    """Its token ids."""

    def __post_init__(self) -> None:
        self.prompt = memoryview(self.request.tokens).cast("I")

    def block(self, prefix_tokens: int) -> Hashable | None:
        """Names what would be computed of its prompt behind so many cached tokens."""
        return block_of(self.prompt, prefix_tokens, self.request.namespace)

    def written(self, step: int) -> int:
        """Output tokens after decode step number `step`."""
        return self.output + step - self.joined

    def held(self, step: int) -> int:
        """Tokens of its context in the pool after that step: all but the last one written."""
        return self.length + step - self.joined

    def said(self, written: int) -> bytes:
        """The first `written` tokens of its answer."""
        if not written:
            return b""
        if self.answer is None:
            self.answer = answer(self.request.tokens, self.output_limit)
        return self.answer[: written * TOKEN_BYTES]

    def take_back(self, written: int) -> None:
        """It gives its memory up: its prompt and what it has written are to be computed again."""
        self.output = written
        self.tokens, self.found = self.known(written), None
        self.length = self.prompt_tokens + written

    def known(self, written: int) -> bytes:
        """Its prompt and the first `written` tokens of its answer."""
        return self.request.tokens + self.said(written)
