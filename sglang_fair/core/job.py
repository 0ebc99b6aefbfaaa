"""One request as the scheduler of a replica sees it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, eq=False)
class Job:
    """One request, from its arrival at a replica to its end. Compared by identity.

    Each field has one writer. The shell that makes the job sets the first group, which never changes; the other groups
    are named by their writer.
    """

    # The shell that makes it, once.
    id: str
    client: str
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    system: bool = False
    """The server's own work (health probe, warm-up): charged to the system account, never held back."""
    expected_output_tokens: int | None = None
    """The output that its sender announced; None: it announced none."""
    unblocks: int = 0
    """Requests of its program that its sender holds back until this one is answered."""
    weight: float | None = None
    """Its client's weight in the tenants' file; None: it has none."""
    weight_version: int = 0
    """Of that file: the latest holds."""
    arrived_s: float = 0.0
    """By the clock of the engine."""
    attempt: str = ""
    """The gateway's id of the attempt of which it is one of several answers, or prompts: `explain` shows them all under
    it. Empty: its own id."""
    session: str = ""
    """Which of its client's sessions sends it; they take turns (`clients`)."""
    app: str = ""
    interaction: str = ""
    stage: str = ""
    call: int = 1
    """Its number in its interaction, from 1 (`interactions`)."""
    deadline_s: float | None = None
    """When its first token is due, by the clock of the engine; None: nothing was promised."""
    expires_s: float | None = None
    """When it is dropped, if it has not been admitted by then; None: never."""
    slo_class: str = ""
    """By which promise (`common.deadlines`)."""
    tier: int = 0
    """0: within its client's share of the cluster; 1: beyond it. Set by its gateway."""
    system_tokens: int = 0
    """Of its prompt: those of system messages, which are taken for its beginning. As its sender calls its messages."""

    request: Any = None
    """What the shell has of it; None once it has ended."""
    given_tokens: int = 0
    """Output that it had when the shell made this job."""

    # `FairQueue`.
    arrival: int = 0
    """Number in order of arrival at this queue."""

    # `Admission`.
    prefix_tokens: int = 0
    """Its cached prefix as last looked up: an estimate, for the order. What the engine finds at admission counts."""
    block: Hashable | None = None
    """Names the first tokens behind that prefix: two jobs with the same block would compute the same tokens."""
    waited_for: object = None
    """The computation of its prefix that it was passed over for last."""
    waited_at_tokens: int = -1
    """`prefix_tokens` when it began to wait for that."""
    decoding: bool = False
    """It runs, and its prompt is computed."""

    # `Account`: what the engine did for it so far.
    scale: float = 1.0
    """What the policy counts of its cost is multiplied by this (`Policy.scale`)."""
    path: Sequence[Hashable] = ()
    """The blocks of its prompt (`payers.path_of`), known from its admission on where clients share prices."""
    extend_tokens: int = 0
    """Prompt tokens computed and charged; what is computed again after a retraction is not among them."""
    cached_tokens: int = 0
    """Prompt tokens that its first admission found in the cache."""
    output_tokens: int = 0
    unasked_tokens: int = 0
    """Output beyond its limit or its end, on the server's account."""
    predicted_tokens: int = 0
    """Output that was charged at admission, made or not."""
    reached_tokens: int = 0
    """Of its prompt: cached when it was last admitted, or computed since."""
    unpriced_units: float = 0.0
    """Charged for the last block of its prompt, while that is incomplete."""
    retractions: int = 0
    repeating: bool = False
    """It was retracted: what is computed of its prompt again is on the server's account."""

    @property
    def system_extend_tokens(self) -> int:
        """Of `extend_tokens`: those of the system prompt. What is cached is the beginning of a prompt."""
        return max(0, min(self.system_tokens - self.cached_tokens, self.extend_tokens))
