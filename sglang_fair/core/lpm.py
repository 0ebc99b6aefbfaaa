"""LPM: longest prefix match first (SGLang's RadixAttention order), without its cut-off at 128 requests.

Unit of fairness: none. The best hit rate, and a client whose prefix is hot can keep every other client
waiting for ever; so can a hot prefix of the same client (DLPM §2, §3).
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
