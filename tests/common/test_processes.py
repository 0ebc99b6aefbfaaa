"""Children end with the process that started them, also when it dies before they have asked the kernel for it.

A program that a shell has started lives on.
"""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_fair.common.processes import PARENT, child_environment
from tests.support.live import lives
from tests.support.waiting import wait_until

LIVES_ON = "from sglang_fair.common.processes import die_with_supervisor; die_with_supervisor()"
DIES = "from sglang_fair.common.processes import die_with_parent; die_with_parent()"


def test_a_child_whose_parent_lives_goes_on_and_passes_nothing_on() -> None:
    program = f"{DIES}; import os; print({PARENT!r} in os.environ)"
    for env in (child_environment(), None):
        ended = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
        )
        assert ended.stdout == "False\n"


def test_a_child_whose_parent_died_while_it_imported_ends(tmp_path: Path) -> None:
    died = tmp_path / "died"
    child = f"""
        import time
        from pathlib import Path
        while not Path({str(died)!r}).exists():
            time.sleep(0.01)
        {DIES}
        time.sleep(3600)
    """
    parent = f"""
        import subprocess, sys
        from sglang_fair.common.processes import child_environment
        child = [sys.executable, "-c", {textwrap.dedent(child)!r}]
        print(subprocess.Popen(child, stdout=subprocess.DEVNULL, env=child_environment()).pid)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(ended.stdout)
    assert lives(pid)
    died.touch()
    try:
        wait_until(lambda: not lives(pid), "the orphan's end")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_program_dies_with_its_supervisor_and_not_with_a_shell(tmp_path: Path, is_supervised: bool) -> None:
    """The parent ends once the child has asked the kernel. The child then waits for a word, and says one."""
    asked, word, said = (tmp_path / name for name in ("asked", "word", "said"))
    child = f"""
        import os, time
        from pathlib import Path
        {LIVES_ON}
        Path({str(asked)!r}).touch()
        while not Path({str(word)!r}).exists():
            time.sleep(0.01)
        Path({str(said)!r}).write_text(str(os.getppid()))
    """
    parent = f"""
        import os, subprocess, sys, time
        from pathlib import Path
        from sglang_fair.common.processes import PARENT, child_environment
        env = child_environment()
        if not {is_supervised}:
            del env[PARENT]
        child = [sys.executable, "-c", {textwrap.dedent(child)!r}]
        print(subprocess.Popen(child, stdout=subprocess.DEVNULL, env=env).pid, flush=True)
        while not Path({str(asked)!r}).exists():
            time.sleep(0.01)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(parent)], stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(ended.stdout)
    if is_supervised:
        wait_until(lambda: not lives(pid), "the orphan's end")
        assert not said.exists()
    else:
        word.touch()
        wait_until(lambda: not lives(pid), "its own end")
        assert said.exists(), "it was ended"
