"""Replicas on Ray's nodes: what Ray is asked for, and what has become of each replica."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.replica_lists import specs
from sglang_fair.cluster import plan
from sglang_fair.cluster.on_ray import driver, told
from sglang_fair.cluster.on_ray.states import Fleet, Place
from sglang_fair.cluster.on_ray.told import Told
from sglang_fair.cluster.options import ConfigError, Options
from sglang_fair.cluster.plan import FleetFiles, FleetReady, Ports, asked_for, build, placed, written
from sglang_fair.cluster.ports import ReplicaPorts
from sglang_fair.cluster.restart import RestartRule
from sglang_fair.common.processes import PARENT
from tests.cluster.test_cluster import MACHINE, MODEL

FILES = FleetFiles(Path("/run/told.json"), Path("/run/replicas"), Path("/run/8000.sock"))
ON_RAY = Options(ray="10.0.0.1:6379", device="cuda", replicas=3)
PORTS = ReplicaPorts(30_000, 30_001, 30_003, 30_004)


def test_the_command_of_a_replica_is_the_same_here_and_on_a_node() -> None:
    options = Options(replicas=2, quantum=77.0, normal="learnt", extra=("--mem-fraction-static", "0.5"))
    here = build(options, "cpu", MACHINE, MODEL, Ports(8000, 30_100, (PORTS, PORTS))).of("replica")
    asked = asked_for(options, "cpu", MACHINE, (MODEL, MODEL))
    there = [placed(one, plan.LOCAL, PORTS, "/there/python") for one in asked]
    assert [one.argv for one in here] == [one.argv[3:] for one in there], "a fork server is no command"
    assert [one.worker for one in here] == [one.worker for one in there]
    assert there[1].argv[:3] == ("/there/python", "-m", "sglang_fair.engines.replica")
    assert asked[0].renamed("r7").settings["normal"].endswith("learnt.r7")
    assert placed(asked[0].renamed("r7"), plan.LOCAL, PORTS, "p").argv[4] == "r7"


@pytest.mark.parametrize("host", ["10.0.0.7", "fd00::7"])
@pytest.mark.parametrize("extra", [(), ("--ssl-certfile", "cert.pem", "--ssl-keyfile", "key.pem")])
def test_a_replica_says_the_address_of_its_node_where_others_listen(
    host: str, extra: tuple[str, ...]
) -> None:
    (asked,) = asked_for(replace(ON_RAY, replicas=1, extra=extra), "cuda", MACHINE, (MODEL,))
    process = placed(asked, host, PORTS, "python")
    assert process.worker is not None
    (up,) = specs.lines(written(process.worker))
    at = f"[{host}]" if ":" in host else host
    assert up.url == f"{'https' if extra else 'http'}://{at}:30000"
    assert (up.kv, up.replay, up.load) == (f"tcp://{at}:30001", f"tcp://{at}:30002", f"tcp://{at}:30004")
    arguments = dict(zip(process.argv[3::2], process.argv[4::2], strict=False))
    assert arguments["--host"] == host, "it listens there, and nowhere else"


def test_with_a_fleet_replicas_are_not_in_the_plan_and_the_router_follows_its_list() -> None:
    found = build(ON_RAY, "cuda", MACHINE, MODEL, Ports(8000, 30_100, ()), fleet=FILES)
    assert {one.role for one in found.processes} == {"fleet", "router", "gateway"}
    (router,) = found.of("router")
    assert router.argv[router.argv.index("--replicas-file") + 1] == str(FILES.listed)
    assert "--worker" not in router.argv
    (fleet,) = found.of("fleet")
    assert fleet.argv[-1] == str(FILES.told)
    assert fleet.ready == FleetReady("tcp://127.0.0.1:30100", 3), "the router knows all of it"
    assert "fleet" not in plan.DISPENSABLE, "without it a cluster does not go on"
    on_cpu = build(replace(ON_RAY, device="cpu"), "cpu", MACHINE, MODEL, Ports(8000, 30_100, ()), fleet=FILES)
    assert not on_cpu.of("fork-server"), "what is forked here helps nobody there"


def test_what_a_fleet_is_told_is_what_it_reads() -> None:
    options = replace(ON_RAY, client_weights={"a": 2.0}, extra=("--tp", "2"), quiet_replicas=True)
    asked = asked_for(options, "cuda", MACHINE, (MODEL,) * 3)
    said = told.of(options, "cuda", asked, FILES, "tcp://127.0.0.1:30100")
    read = Told.decode(said.encode())
    assert read.bundle == {"CPU": 1.0, "GPU": 2.0}
    assert [placed(one, "h", PORTS, "p") for one in read.replicas] == [
        placed(one, "h", PORTS, "p") for one in asked
    ]


@pytest.mark.parametrize(
    ("options", "bundle"),
    [
        (Options(ray="auto"), {"CPU": 1, "GPU": 1}),
        (Options(ray="auto", extra=("--tp", "4", "--pp-size=2")), {"CPU": 1, "GPU": 8}),
        (Options(ray="auto", device="cpu"), {"CPU": 1}),
        (Options(ray="auto", engine="emulated", gpu="h100-80g", model="llama-3.1-8b"), {"CPU": 1}),
        (
            Options(ray="auto", ray_resources="CPU=8,memory=64e9,fast=0.5"),
            {"CPU": 8, "GPU": 1, "memory": 64e9, "fast": 0.5},
        ),
        (Options(ray="auto", engine="cpu", ray_resources="CPU=0,slot=1"), {"slot": 1}),
    ],
)
def test_a_bundle_is_a_gpu_for_each_rank_unless_more_is_said(
    options: Options, bundle: dict[str, float]
) -> None:
    told.check(options)
    wanted = {"auto": options.device, "emulated": "cpu"}.get(options.engine, options.engine)
    assert told.bundle(options, told.device(wanted)) == bundle
    asked = told.actor_options(bundle)
    assert asked["num_cpus"] + asked["num_gpus"] + sum(asked.get("resources", {}).values()) + asked.get(
        "memory", 0
    ) == sum(bundle.values()), "nothing of it is asked for twice, or not at all"  # fmt: skip


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (Options(ray_resources="CPU=1"), "--ray-resources is for --ray"),
        (Options(ray="ray://10.0.0.1:10001"), "not Ray Client"),
        (Options(ray="auto", swap="all", models="a=x,b=y"), "--swap is not there with --ray"),
        (Options(ray="auto", scale_up=1, placement="qlm"), "--scale-up is not there with --ray"),
        (Options(ray="auto", ray_resources="CPU=many"), "CPU=many is not an amount"),
        (Options(ray="auto", ray_resources="CPU=-1"), "CPU=-1 is not an amount"),
        (Options(ray="auto", ray_resources="CPU=inf"), "CPU=inf is not an amount"),
        (Options(ray="auto", ray_resources="GPU=1", extra=("--tp", "2")), "2 ranks, each with a GPU"),
    ],
)
def test_what_cannot_be_is_one_line(options: Options, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        told.check(options)
    assert "\n" not in str(raised.value)


def test_replicas_get_what_is_meant_for_them_alone() -> None:
    environment = {
        "SGLANG_FAIR_REPLICA_KEY": "theirs", "SGLANG_FAIR_ADMIN_KEY": "ours", "SGLANG_FAIR_FEEDER_KEY": "ours",
        "SGLANG_USE_X": "1", "HF_TOKEN": "t", "PATH": "/here", "CUDA_VISIBLE_DEVICES": "0", PARENT: "1",
    }  # fmt: skip
    assert told.carried(environment) == {
        "SGLANG_FAIR_REPLICA_KEY": "theirs", "SGLANG_USE_X": "1", "HF_TOKEN": "t"
    }  # fmt: skip


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "127.0.0.1:port", "127.0.0.1:99999", "no-such-host.invalid:1"]
)
def test_an_address_where_nobody_answers_is_said_at_once(address: str) -> None:
    with pytest.raises(driver.RayFailed, match=address) as raised:
        driver.Ray(address, {}, 1, False, {})
    assert "\n" not in str(raised.value)


# -- what has become of each


def place(name: str, life: int) -> Place:
    (asked,) = asked_for(replace(ON_RAY, replicas=1), "cuda", MACHINE, (MODEL,))
    worker = placed(asked.renamed(name), "10.0.0.7", PORTS, "python").worker
    assert worker is not None
    return Place(worker, "node", 1, str(life))


def fleet(count: int = 2) -> Fleet:
    found = Fleet(RestartRule(give_up_after=3))
    for asked in asked_for(replace(ON_RAY, replicas=count), "cuda", MACHINE, (MODEL,) * count):
        found.ask(asked)
    return found


def is_up(found: Fleet, name: str, now_s: float = 0.0) -> None:
    found.starts(name, place(name, 1))
    found.is_ready(name, now_s)


def names(found: Fleet) -> list[str]:
    return [worker.name for worker in found.listed()]


def test_one_that_cannot_be_started_again_is_given_up_unless_it_is_the_last() -> None:
    found = fleet()
    is_up(found, "r0")
    is_up(found, "r1")
    assert found.was_up
    for now_s in range(1, 9):
        assert found.ended("r1", now_s) is not None, "it was ready, so it may have died of a request"
        is_up(found, "r1", now_s)
    assert names(found) == ["r0", "r1"]
    assert [found.ended("r1", 100.0) is None for _ in range(4)] == [False, False, False, True]
    assert not found.is_lost()
    assert found["r1"].state == "given up"
    assert None not in [found.ended("r0", 100.0) for _ in range(9)]
    assert not found.is_lost(), "the last one is started again and again"


def test_a_node_that_is_gone_is_no_early_death() -> None:
    found = fleet()
    is_up(found, "r0")
    is_up(found, "r1")
    for life in range(10):
        found.lost("r1")
        assert names(found) == ["r0"]
        found.starts("r1", place("r1", life))
        found.is_ready("r1", 0.0)
    assert found["r1"].deaths.early == 0
    assert names(found) == ["r0", "r1"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["r0", "r1", "r2"]),
            st.sampled_from(["starts", "is_ready", "ended", "lost", "drain", "stays"]),
        ),
        max_size=40,
    )
)
def test_only_those_that_have_answered_and_stay_are_listed(changes: list[tuple[str, str]]) -> None:
    found, ready, draining = fleet(3), set[str](), set[str]()
    for now_s, (name, change) in enumerate(changes):
        if change == "starts":
            found.starts(name, place(name, now_s))
            ready.discard(name)
        elif change == "is_ready":
            if found[name].place is None:
                continue
            found.is_ready(name, now_s)
            ready.add(name)
        elif change in ("ended", "lost"):
            found.ended(name, now_s) if change == "ended" else found.lost(name)
            ready.discard(name)
            if found[name].state == "given up":
                draining.discard(name)
        elif change == "drain":
            found.drain(name)
            draining.add(name)
        else:
            found.stays(name)
            draining.discard(name)
        assert set(names(found)) == ready - draining
