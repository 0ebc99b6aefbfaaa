"""The process in which a router's plans are made: what is late, fails or dies is None."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from router.core import Router
from router.events import Planned, Tick, WorkerUp
from router.placement import build
from router.plans import Plans
from router.shell import Shell
from tests.router.test_queued import Queues
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def plans() -> Iterator[Plans]:
    made = Plans(lambda: None)
    yield made
    made.close()


def answered(plans: Plans) -> Planned:
    return wait_until(plans.done, "an answer")


def lives(pid: int | None) -> bool:
    try:
        os.kill(pid or -1, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_work_is_done_elsewhere_one_after_the_other(plans: Plans) -> None:
    plans.ask(1, partial(divmod, 7, 2))
    assert answered(plans) == Planned(1, (3, 1))
    assert plans.done() is None
    assert plans.pid not in (None, os.getpid())
    plans.ask(2, partial(divmod, 7, 0))
    assert answered(plans) == Planned(2)
    plans.ask(3, os.getpid)
    assert answered(plans) == Planned(3, plans.pid)


@pytest.mark.slow
def test_a_process_that_is_killed_costs_one_answer_and_one_that_is_late_its_process(plans: Plans) -> None:
    plans.ask(1, os.getpid)
    first = answered(plans).found
    plans.ask(2, partial(time.sleep, 600))
    os.kill(first, signal.SIGKILL)
    assert answered(plans) == Planned(2)
    plans.ask(3, os.getpid)
    second = answered(plans).found
    assert second != first
    plans.ask(4, partial(time.sleep, 600))
    plans.ask(5, os.getpid)
    third = answered(plans)
    assert third.number == 5
    assert third.found != second
    wait_until(lambda: not lives(second), "the end of the one that was late")
    os.kill(third.found, signal.SIGKILL)
    wait_until(lambda: not lives(third.found), "the end of one that had nothing to do")
    plans.ask(6, os.getpid)
    last = answered(plans)  # asked before it was known to be dead, it may fail once
    if last.found is None:
        plans.ask(7, os.getpid)
        last = answered(plans)
    assert last.found not in (None, third.found)


@pytest.mark.slow
def test_the_shell_has_the_core_s_question_answered_and_ends_the_process() -> None:
    queues = Queues(os.getpid)
    shell = Shell(Router(queues, name="queues"), "tcp://127.0.0.1:*")
    shell.tell(WorkerUp("a", "http://a"))
    assert shell._plans.pid is None, "it is started with the first question"
    queues.asks = True
    shell.tell(Tick())

    def turned() -> int | None:
        shell.loop.run_until_complete(asyncio.sleep(0.01))
        return dict(queues.answered).get(1)

    pid = wait_until(turned, "an answer")
    assert pid not in (None, os.getpid())
    shell.close()
    wait_until(lambda: not lives(pid), "the end of the process")


def test_a_placement_that_plans_nothing_starts_no_process() -> None:
    shell = Shell(Router(build("d2lpm"), name="d2lpm"), "tcp://127.0.0.1:*")
    shell.tell(WorkerUp("a", "http://a"))
    shell.tell(Tick())
    assert shell._plans.pid is None
    shell.close()
