"""Which GPUs replicas get: what nvidia-smi and CUDA_VISIBLE_DEVICES say, and clusters that share one machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.cluster.control import Refused, ask, socket_path
from sglang_fair.cluster.gpus import GpusTaken, Machine, listed, take, visible
from sglang_fair.cluster.local import Additions
from sglang_fair.cluster.options import ConfigError, Options
from sglang_fair.cluster.plan import build
from sglang_fair.cluster.ports import Marks, Ports, ReplicaPorts, Reservations
from tests.cluster.test_cluster import GPU_MACHINE, MODEL, PORTS, of_our_own
from tests.support.waiting import wait_until

LIMIT_S = 240.0
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

FOUR = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aa11)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-aa22)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-bb33)
GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-cc44)
"""

DIVIDED = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aa11)
  MIG 3g.40gb     Device  0: (UUID: MIG-1111-a)
  MIG 3g.40gb     Device  1: (UUID: MIG-2222-b)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-bb22)
"""


def kind() -> str:
    """A kind of marks that no other test uses, nor this machine's clusters."""
    return f"gpu-test-{os.getpid()}-{os.urandom(4).hex()}"


@pytest.mark.parametrize(
    ("text", "allowed", "names"),
    [
        (FOUR, None, "0 1 2 3"),
        (FOUR, "1", "1"),
        (FOUR, " 3, 0 ", "3 0"),
        (FOUR, "", ""),
        (FOUR, "-1", ""),
        (FOUR, "2,-1,3", "2"),
        (FOUR, "0,9,1", "0"),
        (FOUR, "NoDevFiles", ""),
        (FOUR, "GPU-aa22,GPU-cc", "1 3"),
        (FOUR, "GPU-aa", ""),
        (FOUR, "GPU-aa11,0,0", "0"),
        (DIVIDED, None, "MIG-1111-a MIG-2222-b 1"),
        (DIVIDED, "MIG-2222-b,1", "MIG-2222-b 1"),
        (DIVIDED, "0", "MIG-1111-a"),
        (DIVIDED, "GPU-aa11,MIG-1111", "MIG-1111-a"),
        ("", None, ""),
        ("", "0,1", ""),
        ("No devices were found\n", "0", ""),
    ],
)
def test_what_may_be_used(text: str, allowed: str | None, names: str) -> None:
    assert " ".join(gpu.name for gpu in visible(listed(text), allowed)) == names


def test_one_gpu_has_one_name_however_it_was_called() -> None:
    cards = listed(FOUR)
    assert visible(cards, "2") == visible(cards, "GPU-bb33") == visible(cards, "GPU-b")
    assert visible(cards, "2")[0].uuid == "GPU-bb33"


def cuda(replicas: int, each: int) -> Options:
    return Options(device="cuda", replicas=replicas, extra=("--tp", str(each)))


@LINUX
def test_too_few_are_visible_or_free() -> None:
    parts = visible(listed(DIVIDED), None)
    with contextlib.closing(Marks(kind())) as marks:
        assert take(cuda(3, 1), "cuda", parts, marks)[1][0].name == "MIG-2222-b"
        with pytest.raises(
            ConfigError, match="1 are visible, besides 2 MIG devices, which serve one process each"
        ):
            take(cuda(1, 2), "cuda", parts, marks)
        with pytest.raises(ConfigError, match="2 replicas with 8 GPUs each need 16 GPUs, 8 are visible"):
            take(cuda(2, 8), "cuda", GPU_MACHINE.gpus, marks)
        for number in (1, 3, 5, 7):
            assert marks.take(f"GPU-{number}")
        with pytest.raises(
            GpusTaken, match="3 replicas with 2 GPUs each need 6 GPUs; of 8 that are visible 4 are free"
        ):
            take(cuda(3, 2), "cuda", GPU_MACHINE.gpus, marks)
        assert take(cuda(2, 2), "cuda", GPU_MACHINE.gpus, marks), "what was taken for nothing is given back"


def test_a_replica_is_told_its_gpus_by_the_numbers_of_nvidia_smi() -> None:
    options = Options(device="cuda", extra=("--tp", "2"))
    gpus = visible(listed(FOUR), "GPU-cc44,1,GPU-aa11,2")
    with contextlib.closing(Marks(kind())) as marks:
        plan = build(options, "cuda", GPU_MACHINE, MODEL, PORTS, take(options, "cuda", gpus, marks))
        assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in plan.of("replica")] == ["3,1", "0,2"]
        assert {spec.env["CUDA_DEVICE_ORDER"] for spec in plan.of("replica")} == {"PCI_BUS_ID"}
        on_cpu = build(options, "cpu", GPU_MACHINE, MODEL, PORTS, take(options, "cpu", gpus, marks))
        assert not any("CUDA_VISIBLE_DEVICES" in spec.env for spec in on_cpu.processes)


class Cluster:
    """What one cluster has of the machine's GPUs, by replica."""

    def __init__(self, kind: str, machine: Machine, each: int, reservations: Reservations) -> None:
        self.marks = Marks(kind)
        options = Options(extra=("--tp", str(each)))
        ports = Ports(1, 2, (ReplicaPorts(3, 4, 6),))
        self.more = Additions(options, "cuda", MODEL, ports, reservations, self.marks, lambda: machine)
        self.specs: dict[int, Any] = {}

    def add(self, number: int) -> None:
        self.specs[number] = self.more.plan(number)[0]

    def drain(self, number: int) -> None:
        self.more.freed(self.specs.pop(number))

    def dies(self) -> None:
        self.marks.close()
        self.specs.clear()


@LINUX
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from(["add", "add", "add", "drain", "die"]), st.integers(0, 3)
        ),
        max_size=30,
    ),
    each=st.tuples(*[st.integers(1, 3)] * 3),
)
def test_no_gpu_is_ever_used_twice_and_none_stands_idle(
    steps: list[tuple[int, str, int]], each: tuple[int, int, int]
) -> None:
    """Clusters with other CUDA_VISIBLE_DEVICES come, grow, shrink and die in any order."""
    allowed = ["0,1,2,3", "GPU-cc44,GPU-bb,0", None]
    own = kind()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        of_our_own(patch)
        reservations = stack.enter_context(contextlib.closing(Reservations("127.0.0.1")))
        clusters = []
        for names, count in zip(allowed, each, strict=True):
            machine = Machine(8, visible(listed(FOUR), names), True, "python")
            made = Cluster(own, machine, count, reservations)
            clusters.append((made, {gpu.uuid for gpu in machine.gpus}, count))
            stack.callback(made.marks.close)
        for index, step, number in steps:
            cluster, may_use, count = clusters[index]
            used = [gpu.uuid for one, _, _ in clusters for spec in one.specs.values() for gpu in spec.gpus]
            if step == "die":
                cluster.dies()
            elif step == "drain" and number in cluster.specs:
                cluster.drain(number)
            elif step == "add" and number not in cluster.specs:
                if count > len(may_use - set(used)):
                    with pytest.raises(GpusTaken):
                        cluster.add(number)
                    continue
                cluster.add(number)
                uuids = {gpu.uuid for gpu in cluster.specs[number].gpus}
                assert len(uuids) == count
                assert uuids <= may_use - set(used)


# -- processes


HOLDS = """
    import subprocess, sys
    from sglang_fair.cluster.ports import Marks
    marks = Marks(sys.argv[1])
    assert marks.take("GPU-aa11") and marks.take("GPU-aa22")
    child = subprocess.Popen(["sleep", "600"], pass_fds=marks.descriptors(["GPU-aa11", "none of ours"]))
    print(child.pid, flush=True)
    child.wait()
"""


@LINUX
def test_a_gpu_is_free_when_cluster_and_replica_are_gone() -> None:
    own = kind()
    marks = Marks(own)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDS), own], stdout=subprocess.PIPE, text=True
    ) as cluster:
        assert cluster.stdout is not None
        replica = int(cluster.stdout.readline())
        try:
            assert not marks.take("GPU-aa11")
            assert not marks.take("GPU-aa22")
            cluster.kill()
            cluster.wait()
            assert marks.take("GPU-aa22")
            assert not marks.take("GPU-aa11"), "its replica still has it"
        finally:
            os.kill(replica, signal.SIGKILL)
        wait_until(lambda: marks.take("GPU-aa11"), "the replica's GPU is free")
        marks.close()


CLUSTER = """
    import dataclasses, sys
    from sglang_fair.cluster import gpus, options, run

    look = gpus.look
    gpus.look = lambda: dataclasses.replace(look(), cuda_build=True, python=sys.argv[1])
    sys.exit(run.run_cluster(options.Options(
        device="cuda", model="tiny", port=0, json=True, replicas=int(sys.argv[2]), extra=tuple(sys.argv[3:])
    )))
"""

REPLICA = """
    import http.server, json, os, sys
    from sglang_fair.common.processes import die_with_supervisor

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"gpus": os.environ["CUDA_VISIBLE_DEVICES"]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    die_with_supervisor()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@contextlib.contextmanager
def cluster(folder: Path, replicas: int) -> Iterator["subprocess.Popen[bytes]"]:
    """On a machine with the GPUs of `FOUR`. Its replicas only say which GPUs they have."""
    (folder / "replica.py").write_text(textwrap.dedent(REPLICA))
    replica = (
        f'if [ "$2" = sglang_fair.engines.replica ]; then exec {sys.executable} {folder}/replica.py "$@"; fi'
    )
    for name, text in (
        ("nvidia-smi", f"cat <<'END'\n{FOUR}END\n"),
        ("python", f'{replica}\nexec {sys.executable} "$@"\n'),
    ):
        (folder / name).write_text(f"#!/bin/sh\n{text}")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    command = [sys.executable, "-c", textwrap.dedent(CLUSTER), str(folder / "python"), str(replicas)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=LIMIT_S)


def _gpus(url: str) -> str:
    return httpx.get(url, timeout=LIMIT_S).json()["gpus"]


@LINUX
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_clusters_on_one_machine(tmp_path: Path) -> None:
    with cluster(tmp_path, 3) as first:
        assert first.stdout is not None
        facts = json.loads(first.stdout.readline())
        assert [_gpus(url) for url in facts["replicas"]] == ["0", "1", "2"]
        with cluster(tmp_path, 2) as second:
            assert second.wait(LIMIT_S) == 1
            assert second.stderr is not None
            said = second.stderr.read().decode()
            assert "2 replicas with 1 GPU each need 2 GPUs; of 4 that are visible 1 are free" in said
        path = socket_path(int(facts["gateway"].rpartition(":")[2]))
        assert _gpus(ask(path, {"do": "add"}, print, LIMIT_S)["url"]) == "3"
        with pytest.raises(Refused, match="of 4 that are visible 0 are free"):
            ask(path, {"do": "add"}, print, LIMIT_S)
