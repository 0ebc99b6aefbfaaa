"""`python -m sglang_fair.engines.replica` as a test needs it: GET /fair says also what the radix cache holds.

The cache cannot be walked. It is asked for every sequence that a request has left in it: `cache` has the longest
prefix of each that is there, and `cached_tokens` how many tokens the cache says it has, so that none is missed.
"""

import sys
from array import array
from collections.abc import Iterator
from typing import Any

from sglang_fair import overlay
from sglang_fair.engines import replica

Sequence = tuple[str | None, str | None, tuple[int, ...]]
"""Cache salt, extra key, tokens."""

_install = overlay.install


def held(cache: Any, sequences: set[Sequence]) -> Iterator[Sequence]:
    """The longest cached prefix of each, where there is one."""
    from sglang.srt.mem_cache.radix_cache import RadixKey

    for salt, key, tokens in sorted(sequences, key=repr):
        wanted = RadixKey(array("q", tokens), key, cache_salt=salt)
        matched, *_ = cache.tree_core.match_full_device_prefix(wanted)
        if matched:
            yield salt, key, tokens[:matched]


def install() -> None:
    """The overlay, whose reports say more."""
    _install()
    from sglang_fair.overlay.replica import ReplicaFairness

    gone, status = ReplicaFairness._gone, ReplicaFairness.status
    left: set[Sequence] = set()

    def gone_and_noted(fair: Any, job: Any) -> None:
        request = job.request
        left.add((request.cache_salt, request.extra_key, (*request.origin_input_ids, *request.output_ids)))
        gone(fair, job)

    def report(fair: Any, waiting: list[Any]) -> dict[str, Any]:
        cache = fair._tree_cache
        tokens = cache.evictable_size() + cache.protected_size()
        return {**status(fair, waiting), "cache": list(held(cache, left)), "cached_tokens": tokens}

    ReplicaFairness._gone, ReplicaFairness.status = gone_and_noted, report


# SGLang's spawned processes import this module again, and find this in the place of the overlay's entry point.
overlay.install = install

if __name__ == "__main__":
    sys.exit(replica.main())
