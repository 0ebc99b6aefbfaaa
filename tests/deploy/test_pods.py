"""The chart's pods as processes, in networks of their own: they find each other by name, with keys and certificates."""

import shutil
import subprocess
import sys

import pytest

from tests.support.helm import helm

LIMIT_S = 800
"""On a busy machine; an idle one needs a minute."""
NEEDED = """
    ip link set lo up && mount --bind /dev/null /etc/resolv.conf
    ip link add one type veth peer name other && command -v nsenter
"""
"""Of a process in a network of its own."""

pytestmark = [pytest.mark.machine, pytest.mark.timeout(LIMIT_S + 100)]


def test_pods_serve_and_a_router_is_replaced_at_another_address() -> None:
    helm()  # skips the test where there is none
    own_network = ["unshare", "-rmn"]
    if not shutil.which("unshare") or subprocess.run([*own_network, "sh", "-ec", NEEDED]).returncode:
        pytest.skip("this process may not make networks and join them (unshare -rmn, ip link add type veth)")
    command = [*own_network, sys.executable, "-m", "tests.support.pods"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout.endswith("ok\n")
