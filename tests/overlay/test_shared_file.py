"""SGLang's load reports: in a file that vanishes with the replica, however it ends."""

import pytest

from sglang_fair.overlay.shared_file import LOAD_VARIABLE, shm_path_for
from tests.support.live import Replica, check_nothing_is_shared_after

EMULATED = ("--engine", "emulated", "--gpu", "a10g", "--model", "llama-3.2-3b")


def test_without_one_sglang_s_own_path_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LOAD_VARIABLE, raising=False)
    assert shm_path_for("/dev/shm/its-own", "instance") == "/dev/shm/its-own"
    monkeypatch.setenv(LOAD_VARIABLE, "/proc/1/fd/3")
    assert shm_path_for("/dev/shm/its-own", "instance") == "/proc/1/fd/3"


@pytest.mark.engine
def test_a_replica_that_is_killed_leaves_nothing_in_shared_memory() -> None:
    """Of one whose processes SGLang spawns: `tests/engines/test_replica.py`."""
    with Replica(*EMULATED) as one:
        assert one.process is not None
        check_nothing_is_shared_after(one.process.pid, one.url)
        one.process.wait()
