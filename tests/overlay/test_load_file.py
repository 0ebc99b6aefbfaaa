"""SGLang's load reports: in a file that vanishes with the replica, however it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_fair.overlay import load_file
from tests.support.live import Replica, living
from tests.support.waiting import wait_until

SHARED_MEMORY = "/dev/shm/"
EMULATED = ("--engine", "emulated", "--gpu", "a10g", "--model", "llama-3.2-3b")


def test_it_is_made_once_and_children_open_it() -> None:
    environ: dict[str, str] = {}
    load_file.replace(environ)
    path = environ[load_file.VARIABLE]
    load_file.replace(environ)
    assert environ[load_file.VARIABLE] == path
    program = "import sys; open(sys.argv[1], 'r+').write('from the child')"
    subprocess.run([sys.executable, "-c", program, path], check=True)
    assert Path(path).read_text() == "from the child"


def test_without_one_sglang_s_own_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(load_file.VARIABLE, raising=False)
    assert load_file.shm_path_for("/dev/shm/its-own", "instance") == "/dev/shm/its-own"
    monkeypatch.setenv(load_file.VARIABLE, "/proc/1/fd/3")
    assert load_file.shm_path_for("/dev/shm/its-own", "instance") == "/proc/1/fd/3"


def shared_files(processes: list[psutil.Process]) -> set[str]:
    """The files in /dev/shm that these hold open or have mapped."""
    found = set()
    for process in processes:
        names = [file.path for file in process.open_files()] + [area.path for area in process.memory_maps()]
        found |= {name for name in names if name.startswith(SHARED_MEMORY)}
    return found


@pytest.mark.engine
@pytest.mark.parametrize("arguments", [(), EMULATED], ids=["cpu", "emulated"])
def test_a_replica_that_is_killed_leaves_nothing_in_shared_memory(arguments: tuple[str, ...]) -> None:
    with Replica(*arguments, forked=False) as one:
        assert one.process is not None
        loads = httpx.get(f"{one.url}/v1/loads", timeout=30).json()["loads"]
        assert [load["dp_rank"] for load in loads] == [0], "the schedulers' reports arrive"
        family = [psutil.Process(one.process.pid)]
        family += family[0].children(recursive=True)
        held = shared_files(family)
        for process in family:
            os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not living(family), "the end of its processes")
        one.process.wait()
    assert [name for name in held if Path(name).exists()] == []
