"""The file of what is normal: written whole or not at all, whoever is killed; what is no such file is refused."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from sglang_fair.core.job import Job
from sglang_fair.core.normal import VERSION
from sglang_fair.core.wsc import Wsc
from sglang_fair.overlay.normal import EVERY_S, IDLE_S, NormalFile, restore
from tests.support.budget import seeds
from tests.support.waiting import wait_until


def learns(policy: Wsc, calls: int, app: str = "chat") -> None:
    for number in range(calls):
        job = Job(str(number), f"client {number % 64}", app=app, stage="plan")
        job.extend_tokens, job.output_tokens = 100, 10
        policy.ended(job)


def test_written_each_minute_and_when_idle_and_at_the_end(tmp_path: Path) -> None:
    path, policy = tmp_path / "normal.json", Wsc()
    kept = NormalFile(str(path))

    def known() -> int:
        return int(json.loads(path.read_text())["all"]["calls"]) if path.exists() else 0

    kept.tick(policy, 0.0, is_busy=True)
    learns(policy, 10)
    kept.tick(policy, EVERY_S - 1, is_busy=True)
    assert known() == 0
    kept.tick(policy, EVERY_S, is_busy=True)
    wait_until(lambda: known() == 10, "the file")
    learns(policy, 1)
    kept.tick(policy, EVERY_S + IDLE_S, is_busy=False)
    wait_until(lambda: known() == 11, "the file of an idle replica")
    learns(policy, 1)
    kept.close(policy)
    assert known() == 12
    assert [one.name for one in tmp_path.iterdir()] == ["normal.json"]


@pytest.mark.slow
def test_whoever_is_killed_while_it_writes_leaves_a_whole_file(tmp_path: Path) -> None:
    path, policy = tmp_path / "normal.json", Wsc()
    for app in range(100):
        learns(policy, 64, f"app {app}")
    NormalFile(str(path)).close(policy)
    least = path.stat().st_size
    assert least > 100_000, "so large that it takes several writes"
    random.seed(7)
    for _ in seeds(20):
        if (pid := os.fork()) == 0:
            kept = NormalFile(str(path))
            while True:
                learns(policy, 1)
                kept.close(policy)
        time.sleep(random.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        again = Wsc()
        restore(again, str(path))
        assert again.normal.calls >= 6400


@pytest.mark.parametrize("content", ["half", "later", "", "[]", "\x80"])
def test_a_file_that_is_something_else_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    path, policy = tmp_path / "normal.json", Wsc()
    learns(policy, 20)
    NormalFile(str(path)).close(policy)
    whole = path.read_bytes()
    later = json.dumps(json.loads(whole) | {"version": VERSION + 1}).encode()
    path.write_bytes(
        {"half": whole[: len(whole) // 2], "later": later}.get(content, content.encode("latin-1"))
    )
    fresh = Wsc()
    with pytest.raises(ValueError, match=r"normal\.json") as refusal:
        restore(fresh, str(path))
    assert "\n" not in str(refusal.value)
    assert fresh.normal.calls == 0
