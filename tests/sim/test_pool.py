"""The page pool: every page is free, cached, or a running request's own, whatever happens."""

from random import Random

import numpy as np
import pytest

from sglang_fair.core.job import Job
from sglang_fair.sim.budget import Settings
from sglang_fair.sim.cache import PrefixCache
from sglang_fair.sim.events import SimRequest
from sglang_fair.sim.pool import Pool
from sglang_fair.sim.task import Task
from tests.support.budget import seeds

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


@pytest.mark.parametrize("seed", seeds(20))
def test_no_page_is_lost_or_invented(seed):
    pool, random = new_pool(), Random(seed)
    running: list[Task] = []
    for number in range(80):
        made = task(str(number), [random.randrange(2) for _ in range(random.randint(2, 60))])
        if pool.room_tokens() >= made.length + 2 * SETTINGS.page_tokens and len(running) < 5:
            admit(pool, made)
            pool.keep(made, made.length)
            running.append(made)
        elif running:
            gone = running.pop(random.randrange(len(running)))
            pool.release(gone, gone.length, 0, keep=random.random() < 0.7)
        pool.check([(each, each.length) for each in running])
    for each in running:
        pool.release(each, each.length, 0, keep=False)
    assert pool.room_tokens() == 400
