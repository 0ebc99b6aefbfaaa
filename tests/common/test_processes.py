"""Children end with the process that started them, also when it dies before they have asked the kernel for it."""

import subprocess
import sys
import textwrap

from sglang_fair.common.processes import PARENT, child_environment
from tests.support.live import lives
from tests.support.waiting import wait_until

DIES = "from sglang_fair.common.processes import die_with_parent; die_with_parent()"


def test_a_child_whose_parent_lives_goes_on_and_passes_nothing_on() -> None:
    program = f"{DIES}; import os; print({PARENT!r} in os.environ)"
    for env in (child_environment(), None):
        ended = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert ended.stdout == "False\n"


def test_a_child_whose_parent_died_while_it_imported_ends() -> None:
    child = f"import time; time.sleep(1); {DIES}; time.sleep(60)"
    parent = f"""
        import subprocess, sys
        from sglang_fair.common.processes import child_environment
        child = [sys.executable, "-c", {child!r}]
        print(subprocess.Popen(child, stdout=subprocess.DEVNULL, env=child_environment()).pid)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(ended.stdout)
    assert lives(pid)
    wait_until(lambda: not lives(pid), "the orphan's end", 10.0)
