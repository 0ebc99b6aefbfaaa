"""Whose prefix is looked up: bounded per pass, everybody in the end, and first of all those who gained."""

from sglang_fair.core.job import Job
from sglang_fair.core.prefixes import Prefixes


def known(prefixes: Prefixes, job: Job, block: str | None = None) -> Job:
    job.block = block
    prefixes.looked_up(job)
    return job


def test_new_requests_come_in_order_of_arrival_and_bounded():
    prefixes = Prefixes(most=6, in_turn=2)
    jobs = [Job(str(number), "a") for number in range(6)]
    for job in jobs:
        prefixes.arrive(job)
    assert prefixes.due() == jobs[:4]
    for job in jobs[:4]:
        known(prefixes, job)
    assert prefixes.due() == jobs[4:]


def test_nothing_is_due_while_nothing_changes():
    prefixes = Prefixes()
    known(prefixes, Job("1", "a"), "block")
    assert prefixes.due() == []


def test_an_insert_makes_those_due_who_wait_for_these_tokens():
    prefixes = Prefixes(in_turn=0)
    gains = [known(prefixes, Job(str(number), "a"), "hot") for number in range(3)]
    known(prefixes, Job("9", "a"), "cold")
    prefixes.inserted("hot")
    prefixes.inserted("nobody's")
    prefixes.changed()
    assert sorted(job.id for job in prefixes.due()) == [job.id for job in gains]
    assert prefixes.due() == []


def test_a_request_that_left_or_was_looked_up_meanwhile_is_not_due():
    prefixes = Prefixes(in_turn=0)
    gone, seen, stays = (known(prefixes, Job(name, "a"), "hot") for name in ("gone", "seen", "stays"))
    prefixes.inserted("hot")
    prefixes.leave(gone)
    known(prefixes, seen, "next")
    assert prefixes.due() == [stays]


def test_after_a_change_everybody_has_a_turn_once():
    prefixes = Prefixes(in_turn=2)
    jobs = [known(prefixes, Job(str(number), "a")) for number in range(5)]
    prefixes.changed()
    seen = []
    while due := prefixes.due():
        assert len(due) <= 2
        seen += due
        for job in due:
            prefixes.looked_up(job)
    assert seen == jobs


def test_nothing_is_kept_of_those_who_left():
    prefixes = Prefixes()
    for number in range(100):
        job = Job(str(number), "a")
        prefixes.arrive(job)
        known(prefixes, job, f"block {number % 7}")
        prefixes.inserted(f"block {number % 7}")
        prefixes.arrive(job)
        prefixes.leave(job)
    assert len(prefixes) == 0
    prefixes.due()
    assert not prefixes._by_block
    assert not prefixes._grown
