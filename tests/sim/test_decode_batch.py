"""The decode batch's sums beside the same numbers counted request by request."""

from random import Random

import pytest

from sglang_fair.core.job import Job
from sglang_fair.sim.answers import TOKEN_BYTES
from sglang_fair.sim.budget import LONGEST_RESERVATION
from sglang_fair.sim.decode_batch import DecodeBatch
from sglang_fair.sim.events import SimRequest
from sglang_fair.sim.pool import Task
from tests.support.budget import seeds

PAGE_TOKENS = 4


def task(id: str, prompt_tokens: int, output_tokens: int, most: int | None = None) -> Task:
    """A request whose prompt is computed and that has its first token."""
    most = most or output_tokens
    request = SimRequest(id, "a", bytes(prompt_tokens * TOKEN_BYTES), output_tokens, most)
    made = Task(
        request,
        Job(id, "a", prompt_tokens, most),
        prompt_tokens,
        output_tokens,
        request.tokens,
        prompt_tokens,
    )
    made.output = 1
    return made


def test_an_aborted_request_ends_earlier_and_once():
    batch = DecodeBatch(PAGE_TOKENS)
    batch.join(given_up := task("1", 5, 50))
    batch.join(other := task("2", 5, 6))
    batch.give_up(given_up, 2)
    batch.give_up(other, 30)  # it ends before
    assert batch.first_end() == 2
    batch.advance(2)
    assert batch.ended() == [given_up]
    assert given_up.aborted
    batch.leave(given_up)
    assert batch.first_end() == 5
    assert not other.aborted


@pytest.mark.parametrize("seed", seeds(20))
def test_the_sums_are_those_of_the_requests(seed):
    random = Random(seed)
    batch, tasks = DecodeBatch(PAGE_TOKENS), list[Task]()
    for step in range(60):
        if random.random() < 0.5:
            tasks.append(
                task(str(step), random.randint(1, 20), random.randint(2, 30), random.choice([None, 9000]))
            )
            batch.join(tasks[-1])
        batch.advance(random.choice([1, 1, 3]) if not tasks else 1)
        for ended in batch.ended():
            batch.leave(ended)
            tasks.remove(ended)
        if tasks and random.random() < 0.2:
            batch.leave(taken_back := tasks.pop(random.randrange(len(tasks))))
            assert taken_back.place == 0
        now = batch.step
        assert batch.held_tokens == sum(each.held(now) for each in tasks)
        assert batch.pages_for_step() == sum(each.held(now) % PAGE_TOKENS == 0 for each in tasks)
        assert batch.reservable_tokens() == sum(
            min(each.job.max_output_tokens - each.written(now), LONGEST_RESERVATION) for each in tasks
        )
        if tasks:
            assert batch.first_end() == min(each.last_step for each in tasks)
            steps = batch.last_step_within(7, now + 9) - now
            pages = [sum((each.held(now) + n) % PAGE_TOKENS == 0 for each in tasks) for n in range(9)]
            assert sum(pages[:steps]) <= 7
            assert steps == 9 or sum(pages[: steps + 1]) > 7
