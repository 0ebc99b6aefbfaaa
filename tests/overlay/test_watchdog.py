"""A scheduler that hangs: who sees it, what it leaves in the log, and what becomes of its replica."""

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_fair.overlay import watchdog
from sglang_fair.overlay.heartbeat import Reading
from tests.support.budget import examples
from tests.support.live import START_S, Cluster, command_line, living
from tests.support.waiting import wait_until

LIMIT_S = 10.0

BOMB = r"(.+)+\x00\x01"
"""Takes twice as long for each character that it is searched in."""

STEPS = st.one_of(
    st.tuples(st.sampled_from(["turns", "computes", "stands", "is held"]), st.floats(0.1, 2.0)),
    st.tuples(st.just("all stand still"), st.floats(2.5, 500.0)),
)
"""What happens until the next look: the loop turns; it stands in a forward pass, or elsewhere; nothing of its process
runs; neither it nor who looks runs."""


@settings(max_examples=examples(200))
@given(st.lists(STEPS, max_size=60))
@example([("turns", 1.0), *[("is held", 2.0)] * 6])
@example([("computes", 1.0), *[("is held", 2.0)] * 6])
@example([("turns", 1.0), *[("stands", 2.0)] * 6])
@example([("turns", 1.0), *[("computes", 2.0)] * 30])
@example([("turns", 1.0), ("is held", 2.0), ("all stand still", 400.0), ("is held", 2.0)])
def test_it_hangs_when_nothing_of_it_ran_for_so_long_in_the_watchdog_s_own_time(
    steps: list[tuple[str, float]],
) -> None:
    watch, now_s = watchdog.Watch(LIMIT_S), 0.0
    ran_s = passed_s = computes_s = 0.0
    held_s = stood_s = 0.0
    assert watch.look(now_s, {3: Reading(0.0, 0.0, True)}) == []
    for what, takes_s in steps:
        now_s += takes_s
        held_s = held_s + takes_s if what == "is held" else held_s if what == "all stand still" else 0.0
        stood_s += 0.0 if what == "all stand still" else takes_s
        if what != "is held" and what != "all stand still":
            ran_s = now_s
        if what == "turns":
            passed_s, stood_s = now_s, 0.0
        if what == "computes":
            computes_s = now_s
        hangs = held_s > LIMIT_S or (stood_s > LIMIT_S and computes_s < passed_s)
        if abs(held_s - LIMIT_S) > 1e-6 and abs(stood_s - LIMIT_S) > 1e-6:
            found = watch.look(now_s, {3: Reading(ran_s, passed_s, computes_s >= passed_s)})
            assert found == ([3] if hangs else [])
        else:
            watch.look(now_s, {3: Reading(ran_s, passed_s, computes_s >= passed_s)})


def test_a_process_that_holds_its_interpreter_shows_its_stack(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        "import re; from sglang_fair.overlay import watchdog; watchdog.show_stacks_when_asked();"
        f"print(flush=True); re.search({BOMB!r}, 'a' * 100)"
    )
    with log.open("w") as stderr:
        child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=stderr)

    def shows() -> bool:
        child.send_signal(watchdog.STACKS)
        return ", line" in (text := log.read_text()) and " in search\n" in text

    try:
        assert child.stdout is not None
        child.stdout.readline()
        wait_until(shows, "its stack", 30)
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


@pytest.mark.e2e
@pytest.mark.timeout(900)
def test_a_replica_whose_scheduler_hangs_is_started_again_and_the_other_serves_meanwhile() -> None:
    """A regular expression holds the scheduler's interpreter for ever."""
    with Cluster("--hang-timeout", "3", "--allow-fields", "stop_regex") as cluster:
        url, gateway = cluster.addresses["replicas"][0], cluster.url
        before = [one for one in cluster.processes() if "sglang::scheduler" in command_line(one)]
        bomb = {
            "input_ids": list(range(100, 140)),
            "sampling_params": {"max_new_tokens": 500, "ignore_eos": True, "stop_regex": BOMB},
        }
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{url}/generate", json=bomb, timeout=120)

        def serves() -> bool:
            body = {"model": "default", "prompt": "Once", "max_tokens": 4}
            assert httpx.post(f"{gateway}/v1/completions", json=body, timeout=120).status_code == 200
            return {one["state"] for one in cluster.status()["workers"].values()} == {"up"}

        wait_until(lambda: len(living(before)) == 1, "the end of one scheduler")
        wait_until(serves, "both replicas again, while requests are answered", START_S)
        log = cluster.log.read_text()
        assert "sglang-fair: scheduler 0 hangs, with 1 requests in flight: this replica ends" in log
        assert "in _check_str_based_finish" in log
