"""One request as a replica's fair queue and its policies see it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Job:
    """One request, from its arrival at a replica to its end. Compared by identity.

    `arrival` numbers the jobs of one queue in order of arrival. `prefix_tokens` is the cached prefix as
    last looked up; the engine's own match at admission is what is charged. `block` identifies the first
    tokens behind that prefix: two jobs with the same block would compute the same tokens.
    """

    id: str
    client: str
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    arrival: int = 0
    prefix_tokens: int = 0
    block: Hashable | None = None
    system: bool = False
    """The server's own work (health probe, warm-up): charged to the system account, never held back."""
    expected_output_tokens: int | None = None
    """The output that whoever sent it announced; None: nobody did."""
    unblocks: int = 0
    """How many requests of its program its sender holds back until it is answered."""
    path: Sequence[Hashable] = ()
    """The blocks of its prompt (`payers.path_of`); asked for at admission only, where clients share prices."""

    # What the engine did for it so far.
    extend_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    unasked_tokens: int = 0
    """Output past its limit: not its client's."""
    predicted_tokens: int = 0
    """Output that the policy was charged for at admission, made or not."""
    reached_tokens: int = 0
    """Of its prompt: cached when it was last admitted, or computed since."""
    unpriced_units: float = 0.0
    """Charged for the last block of its prompt that is not whole yet."""
    retractions: int = 0
    repeating: bool = False
    """Recomputes after a retraction; its extend tokens go to the system account."""

    waited_for: object = None
    """The computation of somebody's prefix that it was last passed over for."""
    waited_at_tokens: int = -1
    """`prefix_tokens` when that was."""
