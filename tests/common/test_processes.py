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


def orphan(folder: Path, before: str, asks: str, *, is_supervised: bool = True) -> int:
    """The id of a child whose parent has ended, after the file "asked" was there if there is something `before` it.
    The child asks the kernel, waits for the file "word", and says in "said" that it lives."""
    child = f"""
        import os, time
        from pathlib import Path
        {before}
        {asks}
        Path({str(folder / "asked")!r}).touch()
        while not Path({str(folder / "word")!r}).exists():
            time.sleep(0.01)
        Path({str(folder / "said")!r}).touch()
    """
    parent = f"""
        import subprocess, sys, time
        from pathlib import Path
        from sglang_fair.common.processes import PARENT, child_environment
        env = child_environment()
        if not {is_supervised}:
            del env[PARENT]
        child = [sys.executable, "-c", {textwrap.dedent(child)!r}]
        print(subprocess.Popen(child, stdout=subprocess.DEVNULL, env=env).pid, flush=True)
        while not {bool(before)} and not Path({str(folder / "asked")!r}).exists():
            time.sleep(0.01)
    """
    command = [sys.executable, "-c", textwrap.dedent(parent)]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


def test_a_child_whose_parent_died_while_it_imported_ends(tmp_path: Path) -> None:
    died = tmp_path / "died"
    pid = orphan(tmp_path, f"while not Path({str(died)!r}).exists(): time.sleep(0.01)", DIES)
    assert lives(pid)
    died.touch()
    try:
        wait_until(lambda: not lives(pid), "the orphan's end")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise


@pytest.mark.parametrize("is_supervised", [True, False])
def test_a_program_dies_with_its_supervisor_and_not_with_a_shell(tmp_path: Path, is_supervised: bool) -> None:
    pid = orphan(tmp_path, "", LIVES_ON, is_supervised=is_supervised)
    if not is_supervised:
        (tmp_path / "word").touch()
    wait_until(lambda: not lives(pid), "its end")
    assert (tmp_path / "said").exists() is not is_supervised
