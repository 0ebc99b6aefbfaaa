"""Whose prefix is looked up: bounded per pass, everybody in the end, and first of all those who gained."""

from sglang_fair.core.job import Job
from sglang_fair.core.lookups import LookUps


def known(look_ups: LookUps, job: Job, block: str | None = None) -> Job:
    job.block = block
    look_ups.looked_up(job)
    return job


def test_new_requests_come_in_order_of_arrival_and_bounded():
    look_ups = LookUps(most=6, in_turn=2)
    jobs = [Job(str(number), "a") for number in range(6)]
    for job in jobs:
        look_ups.arrive(job)
    assert look_ups.due() == jobs[:4]
    for job in jobs[:4]:
        known(look_ups, job)
    assert look_ups.due() == jobs[4:]


def test_nothing_is_due_while_nothing_changes():
    look_ups = LookUps()
    known(look_ups, Job("1", "a"), "block")
    assert look_ups.due() == []


def test_an_insert_makes_those_due_who_wait_for_these_tokens():
    look_ups = LookUps(in_turn=0)
    gains = [known(look_ups, Job(str(number), "a"), "hot") for number in range(3)]
    known(look_ups, Job("9", "a"), "cold")
    look_ups.inserted("hot")
    look_ups.inserted("nobody's")
    look_ups.changed()
    assert sorted(job.id for job in look_ups.due()) == [job.id for job in gains]
    assert look_ups.due() == []


def test_a_request_that_left_or_was_looked_up_meanwhile_is_not_due():
    look_ups = LookUps(in_turn=0)
    gone, seen, stays = (known(look_ups, Job(name, "a"), "hot") for name in ("gone", "seen", "stays"))
    look_ups.inserted("hot")
    look_ups.leave(gone)
    known(look_ups, seen, "next")
    assert look_ups.due() == [stays]


def test_after_a_change_everybody_has_a_turn_once():
    look_ups = LookUps(in_turn=2)
    jobs = [known(look_ups, Job(str(number), "a")) for number in range(5)]
    look_ups.changed()
    seen = []
    while due := look_ups.due():
        assert len(due) <= 2
        seen += due
        for job in due:
            look_ups.looked_up(job)
    assert seen == jobs


def test_nothing_is_kept_of_those_who_left():
    look_ups = LookUps()
    for number in range(100):
        job = Job(str(number), "a")
        look_ups.arrive(job)
        known(look_ups, job, f"block {number % 7}")
        look_ups.inserted(f"block {number % 7}")
        look_ups.arrive(job)
        look_ups.leave(job)
    assert len(look_ups) == 0
    look_ups.due()
    assert not look_ups._groups
    assert not look_ups._group_of
    assert not look_ups._grown
