"""What goes into a simulated replica and what comes out of it."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from sglang_fair.core.job import Job
from sglang_fair.sim.cache import Removed, Stored


class SimRequest(NamedTuple):
    """One request. Its answer has `output_tokens` tokens, which only the model knows before."""

    id: str
    client: str
    tokens: bytes
    output_tokens: int
    max_output_tokens: int
    expected_output_tokens: int | None = None
    weight: float | None = None
    weight_version: int = 0
    session: str = ""
    app: str = ""
    interaction: str = ""
    stage: str = ""
    call: int = 1
    system_tokens: int = 0
    deadline_s: float | None = None
    slo_class: str = ""
    tier: int = 0
    """This and what is above without a text as in `Job`, by the clock of the simulation."""


_FOUND_HERE = ("output_tokens", "max_output_tokens")
OF_JOB = tuple(
    field.name for field in fields(Job) if field.name in SimRequest._fields and field.name not in _FOUND_HERE
)
"""What the job of a request has from it as it is."""


class Progress(NamedTuple):
    """The request has so many output tokens so far. The first report comes with the first token."""

    id: str
    t_s: float
    output_tokens: int


class Finished(NamedTuple):
    """The request is over; `aborted` if it was given up. `answer` is the packed tokens of its answer."""

    id: str
    t_s: float
    output_tokens: int
    cached_tokens: int
    prompt_tokens: int
    aborted: bool = False
    answer: bytes = b""


class Refused(NamedTuple):
    """The request was not let in."""

    id: str
    t_s: float
    reason: str


Event = Progress | Finished | Refused | Stored | Removed


@dataclass(slots=True)
class Meters:
    """What the replica did, by its own count."""

    extend_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that admissions found in the cache, those of retracted requests included."""
    output_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    retractions: int = 0
    evictions: int = 0
    """Requests that were taken back for others."""
    loaded_tokens: int = 0
    """Tokens that came back from the host's memory."""
    host_wait_s: float = 0.0
    """Time in which steps waited for copies from or to the host."""
    swaps: int = 0
    swap_s: float = 0.0

    @property
    def steps(self) -> int:
        return self.prefill_steps + self.decode_steps

    @property
    def busy_s(self) -> float:
        return self.prefill_s + self.decode_s
