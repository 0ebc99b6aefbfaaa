"""Replicas in another network than routers and gateways: a cut and healed cable leaves each request one outcome."""

import subprocess
import sys

import pytest

from tests.support.networks import may_join_two

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]


def test_a_cable_is_cut_and_healed_under_load() -> None:
    if not may_join_two():
        pytest.skip("this process may not make networks and join them (unshare -rmn, ip link add type veth)")
    command = ["unshare", "-rmn", sys.executable, "-m", "tests.support.two_networks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout.endswith("ok\n")
