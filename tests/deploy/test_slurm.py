"""The script of a job of Slurm's, with a `srun` and replicas that are small programs: what it lists, and when."""

import os
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.replica_lists import specs
from tests.support.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "deploy/slurm/replicas.sbatch"

SRUN = """
    shift 2
    SLURM_PROCID=0 "$@" & first=$!
    SLURM_PROCID=1 "$@" & wait $first
    code=$?
    wait $! && exit $code
"""
STAYS = """
    echo "$@" >> "$LIVES"
    trap 'echo finished >> "$LIVES"; exit 0' TERM
    while :; do /bin/sleep 0.1; done
"""
DIES = """
    echo "$@" >> "$LIVES"
    exit 3
"""


class Job:
    """The script as batch systems run it, in which no `sleep` takes long."""

    def __init__(self, tmp_path: Path, replica: str) -> None:
        self.listed, self.lives = tmp_path / "replicas", tmp_path / "lives"
        self.lives.touch()
        for name, body in (("srun", SRUN), ("sleep", "exec /bin/sleep 0.05"), ("replica", replica)):
            (tmp_path / name).write_text(f"#!/bin/bash\n{textwrap.dedent(body)}")
            (tmp_path / name).chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SGLANG_FAIR_LIST": str(self.listed),
            "SGLANG_FAIR_ADDRESS": "127.0.0.1", "SGLANG_FAIR_PYTHON": str(tmp_path / "replica"),
            "LIVES": str(self.lives), "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(tmp_path),
        }  # fmt: skip

    @contextmanager
    def runs(self, *arguments: str) -> "Iterator[subprocess.Popen[bytes]]":
        with subprocess.Popen(
            ["bash", str(SCRIPT), *arguments], env=self.environment, start_new_session=True
        ) as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def names(self) -> list[str]:
        return [up.worker for up in specs.lines(self.listed.read_text())] if self.listed.exists() else []


def test_each_task_lists_its_replica_and_takes_it_away_before_it_ends(tmp_path: Path) -> None:
    job = Job(tmp_path, STAYS)
    job.listed.write_text("other,http=http://10.0.0.7:1\nj7-0,http=http://10.0.0.8:1\n")
    with job.runs("--model", "m", "--", "--ssl-certfile", "c") as process:
        wait_until(lambda: sorted(job.names()) == ["j7-0", "j7-1", "other"], "both are listed")
        ups = {up.worker: up for up in specs.lines(job.listed.read_text())}
        first, second = (ups[name] for name in ("j7-0", "j7-1"))
        assert first.url.startswith("https://127.0.0.1:3"), "it is not that of before the job was requeued"
        wait_until(lambda: job.lives.read_text().count("\n") == 2, "both run")
        given = next(line for line in job.lives.read_text().splitlines() if "--name=j7-0" in line)
        port = int(first.url.rpartition(":")[2])
        assert given.startswith("-m sglang_fair.engines.replica --host=127.0.0.1")
        assert f"--port={port} --kv-port={port + 1} --load-port={port + 3} --model m -- --ssl" in given
        assert given.endswith(f"--nccl-port={port + 4}")
        assert (first.kv, first.replay, first.load) == tuple(
            f"tcp://127.0.0.1:{port + at}" for at in (1, 2, 3)
        )
        assert abs(int(second.url.rpartition(":")[2]) - port) >= 5, "no two have a port in common"
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: job.names() == ["other"], "they are listed no more")
        assert process.wait(20) == 0
        assert job.lives.read_text().count("finished") == 2
        assert list(tmp_path.glob("*leave*")) == []


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_one_that_dies_is_started_elsewhere_and_in_the_end_given_up(
    tmp_path: Path, dashes: tuple[str, ...]
) -> None:
    job = Job(tmp_path, DIES)
    with job.runs(*dashes) as process:
        assert process.wait(30) == 1
    lives = [line for line in job.lives.read_text().splitlines() if "--name=j7-0" in line]
    assert len(lives) == 5
    assert len({line.partition("--port=")[2].partition(" ")[0] for line in lives}) == 5
    assert all(" -- --nccl-port=" in line for line in lives)
    assert job.names() == []


def test_no_line_is_lost_when_many_write_at_once(tmp_path: Path) -> None:
    job = Job(tmp_path, STAYS)
    function = SCRIPT.read_text().partition("\nlist() {")[2].partition("\n}\n")[0]

    def write(number: int) -> None:
        line = f"j{number}-0,http=http://10.0.0.7:{number + 1}"
        subprocess.run(
            ["bash", "-euc", f"list() {{{function}\n}}\nlist 'j{number}-0,' '{line}'"],
            env=job.environment, check=True, timeout=60,
        )  # fmt: skip

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(24)))
    assert sorted(job.names()) == sorted(f"j{number}-0" for number in range(24))


def test_a_node_without_an_address_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path, STAYS)
    (tmp_path / "getent").write_text("#!/bin/bash\necho '127.0.1.1 STREAM here'")
    (tmp_path / "getent").chmod(0o755)
    del job.environment["SGLANG_FAIR_ADDRESS"]
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=job.environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "say SGLANG_FAIR_ADDRESS" in done.stderr
