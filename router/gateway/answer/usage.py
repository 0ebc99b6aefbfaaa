"""What an answer came to, as its replica says."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Tokens of one request, over all its answers. `cached_tokens` is None if not reported."""

    output_tokens: int = 0
    cached_tokens: int | None = None
