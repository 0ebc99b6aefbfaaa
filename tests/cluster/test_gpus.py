"""Which GPUs replicas get: what nvidia-smi and CUDA_VISIBLE_DEVICES say, and clusters that share one machine."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.cluster.gpus import GpusTaken, Machine, listed, take, visible
from sglang_fair.cluster.local import Additions
from sglang_fair.cluster.options import ConfigError, Options
from sglang_fair.cluster.plan import build
from sglang_fair.cluster.ports import Marks, Ports, ReplicaPorts, Reservations
from tests.cluster.test_cluster import GPU_MACHINE, MODEL, PORTS, of_our_own
from tests.support.waiting import wait_until

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")

FOUR = """\
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aa11)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-aa22)
GPU 2: NVIDIA A100-SXM4-80GB (UUID: GPU-bb33)
GPU 3: NVIDIA A100-SXM4-80GB (UUID: GPU-cc44)
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
        (FOUR, "MIG-2222-b,1", ""),
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
    with contextlib.closing(Marks(kind())) as marks:
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
