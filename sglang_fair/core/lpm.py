"""LPM: longest prefix match first (SGLang's RadixAttention order), without its cut-off at 128 requests.

Unit of fairness: none. It has the best hit rate. A client with a hot prefix can keep all others waiting for ever, and
one hot prefix of a client its other requests (DLPM §2, §3).
"""

from typing import Any, ClassVar

from sglang_fair.core.fcfs import Fcfs
from sglang_fair.core.job import Job


def longest_prefix(job: Job) -> Any:
    """Longest cached prefix first, then arrival order."""
    return (-job.prefix_tokens, job.arrival)


class Lpm(Fcfs):
    """Jobs by cached prefix, one queue."""

    name: ClassVar[str] = "lpm"
    waits_for_prefixes: ClassVar[bool] = True

    def key(self, job: Job) -> Any:
        return longest_prefix(job)
