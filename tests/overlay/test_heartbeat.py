"""Heartbeats: what the schedulers write, their server reads, also once they are dead."""

import json
import os
import subprocess
import sys
import time

import pytest

from router.gateway.replicas.health import Liveness
from sglang_fair.overlay import heartbeat


def test_a_child_writes_what_its_parent_reads() -> None:
    environ: dict[str, str] = {}
    heartbeat.share(environ)
    shared = dict(environ)
    heartbeat.share(environ)
    assert environ == shared
    reader = heartbeat.Heartbeats(environ)
    assert reader.read(time.monotonic()) == []
    program = (
        "import time; from sglang_fair.overlay import heartbeat; one = heartbeat.attach(2);"
        "one.passed(); one.computes(); print(flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | environ, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        before_s = time.monotonic()
        body = {"in_flight": 1, "schedulers": reader.read(before_s)}
        told = Liveness.read(json.dumps(body).encode())
        assert told is not None
        [scheduler] = told.schedulers
        assert 0 <= scheduler.passed_s_ago < 60
        assert 0 <= scheduler.ran_s_ago < 60
        assert scheduler.computes
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    [gone] = reader.read(before_s + 100)
    assert gone["ran_s_ago"] > 90, "what nobody writes any more grows old"


def test_a_loop_that_comes_round_ends_the_forward_pass() -> None:
    readings = [0.0] * 6
    one = heartbeat.Heartbeat(readings, 3)
    one.passed()
    one.computes()
    first = list(readings)
    assert first[:3] == [0.0] * 3
    assert 0 < first[4] <= first[5]
    one.passed()
    assert readings[4] >= first[5], "and so it computes no more, or for no time"


@pytest.mark.parametrize("rank", [None, heartbeat.SLOTS])
def test_who_leads_no_step_shares_nothing(rank: int | None) -> None:
    environ: dict[str, str] = {}
    assert heartbeat.Heartbeats(environ).read(1.0) == []
    heartbeat.attach(0, environ).passed()
    heartbeat.share(environ)
    heartbeat.attach(rank, environ).passed()
    assert heartbeat.Heartbeats(environ).read(1.0) == []
