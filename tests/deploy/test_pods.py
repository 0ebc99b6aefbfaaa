"""The chart's pods as processes, in networks of their own: they find each other by name, with keys and certificates."""

import subprocess
import sys

import pytest

from tests.support.budget import is_night
from tests.support.helm import helm
from tests.support.networks import may_join_two

LIMIT_S = 800
"""On a busy machine; an idle one needs a minute."""

pytestmark = [pytest.mark.machine, pytest.mark.timeout(LIMIT_S + 100)]


def test_pods_serve_and_are_replaced_at_other_addresses() -> None:
    helm()  # skips the test where there is none
    if not may_join_two():
        pytest.skip("this process may not make networks and join them (unshare -rmn, ip link add type veth)")
    length = "long" if is_night() else "short"
    command = ["unshare", "-rmn", sys.executable, "-m", "tests.support.pods", length]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert done.stdout.endswith("ok\n")
