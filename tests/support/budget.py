"""How much a random test tries: a fifth on a push, the same each time; all of it at night, with fresh seeds.

`make nightly` chooses the profile (`--hypothesis-profile=nightly`) and prints `SEED`, which repeats its run.
"""

import os
from collections.abc import Sequence

from hypothesis import settings

SEED = "SGLANG_FAIR_TEST_SEED"
"""The environment variable with the night's seed."""

PUSH, NIGHTLY = "push", "nightly"

settings.register_profile(PUSH, deadline=None, derandomize=True, max_examples=20)
settings.register_profile(NIGHTLY, deadline=None, derandomize=False, print_blob=True, max_examples=100)


def is_night() -> bool:
    return settings.get_current_profile_name() == NIGHTLY


def examples(full: int) -> int:
    """A fifth of `full` on a push, at least 4 where `full` has that many; all of it at night."""
    return full if is_night() else min(full, max(4, full // 5))


def seeds(full: int) -> Sequence[int]:
    """`examples(full)` seeds: the first numbers on a push, others each night."""
    first = int(os.environ.get(SEED, "0")) if is_night() else 0
    return range(first, first + examples(full))
