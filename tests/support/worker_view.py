"""A worker as placements see it, of which a test says what it needs."""

from dataclasses import dataclass


@dataclass
class View:
    """Nothing is in flight there, and nothing was."""

    name: str
    load: float = 0.0
    dispatched_tokens: int = 0
    capacity: float = 1.0
    prefill_tokens: float = 0.0
    decode_tokens: float = 0.0
    dispatched: int = 0
    prefilled_tokens: int = 0
    produced_tokens: int = 0
    overrun_tokens: int = 0
