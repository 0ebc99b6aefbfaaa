"""The page pool: what two have computed at once. `test_replica` checks the pool at each event of any traffic."""

import numpy as np

from sglang_fair.core.job import Job
from sglang_fair.sim.budget import Settings
from sglang_fair.sim.cache import PrefixCache
from sglang_fair.sim.events import SimRequest
from sglang_fair.sim.pool import Pool, Task

SETTINGS = Settings(kv_tokens=400, page_tokens=4)


def new_pool() -> Pool:
    return Pool(SETTINGS, PrefixCache(SETTINGS.page_tokens))


def task(id: str, tokens: list[int]) -> Task:
    packed = np.array(tokens, "<u4").tobytes()
    request = SimRequest(id, "a", packed, 10, 10)
    return Task(request, Job(id, "a", len(tokens), 10), len(tokens), 10, packed, len(tokens))


def admit(pool: Pool, task: Task) -> int:
    """Take the pages of the whole prompt. Returns its cached tokens."""
    node = pool.cache.match(task.tokens, task.length - 1)
    pool.cache.lock(node)
    task.node, task.start, task.computed = node, node.end, task.length
    pool.take([task])
    return node.end


def test_what_two_computed_at_once_is_kept_once():
    pool = new_pool()
    both = [task("1", list(range(40))), task("2", list(range(40)))]
    for each in both:
        admit(pool, each)
    assert pool.free_pages == 80
    for each in both:
        pool.keep(each, each.length)
    assert pool.free_pages == 90
    pool.check([(each, each.length) for each in both])
