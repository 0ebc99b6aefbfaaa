"""The emulated GPU: what it makes of a GPU's name, its clock, its fork server, and a replica and a cluster of it."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_fair.cluster.child import Child
from sglang_fair.cluster.options import ConfigError, Options, check
from sglang_fair.cluster.plan import LineReady, Machine, Model, Process, build, check_memory
from sglang_fair.cluster.ports import Ports, ReplicaPorts
from sglang_fair.common.files import read_json
from sglang_fair.engines import replica
from sglang_fair.engines.emulated import settings
from sglang_fair.models import catalog as models
from sglang_fair.sim.answers import answer
from sglang_fair.sim.cost_model import Fitted, Scaled, make_cost_model, to_json
from sglang_fair.sim.emulation import Emulation
from sglang_fair.sim.gpu_clock import GpuClock, in_words, since
from tests.live import Cluster, Replica, lives
from tests.waiting import wait_until

A100 = Emulation("a100-80g", "llama-3.1-8b")
EMULATED = ("--engine", "emulated", "--gpu", "a10g", "--model", "llama-3.2-3b")


class TestSettings:
    def test_the_kv_pool_is_what_the_gpu_has_beside_the_model(self) -> None:
        room = 0.88 * 81_920 * 2**20 - A100.shape.weight_bytes
        assert A100.kv_tokens == pytest.approx(room / (2 * 32 * 8 * 128 * 2), rel=1e-4)
        assert 400_000 < A100.kv_tokens < 500_000

    @pytest.mark.parametrize(
        ("gpu", "tokens"), [("a10g", 4096), ("a100-80g", 8192), ("h100", 8192), ("h200", 8192)]
    )
    def test_a_chunk_is_sglang_s_default_for_the_gpu(self, gpu: str, tokens: int) -> None:
        assert Emulation(gpu, "llama-3.1-8b").chunked_prefill_tokens == tokens

    def test_its_speed_is_the_roofline_a_calibration_or_either_scaled(self, tmp_path: Path) -> None:
        assert A100.make_cost(read_json) == make_cost_model("a100-80g/llama-3.1-8b")
        measured = Fitted(0.01, 1e-4, 0.0, 0.0, 0.01, 0.0, 0.0)
        path = tmp_path / "measured.json"
        path.write_text(json.dumps(to_json(measured)))
        scaled = Emulation("h100", "llama-3.1-8b", str(path), 0.5)
        assert scaled.make_cost(read_json) == Scaled(measured, 0.5)
        assert scaled.describe(read_json)["cost"]["factor"] == 0.5
        assert "h100" in str(scaled)
        assert "x 0.5" in str(scaled)

    def test_it_reaches_sglang_s_processes_in_the_environment(self) -> None:
        emulation = Emulation("h200", "llama-2-7b", None, 2.0)
        variables = settings.environment(emulation)
        assert settings.read(variables) == emulation
        assert variables["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (("tpu", "llama-3.1-8b"), "unknown --gpu 'tpu'; there are a10g, a100-80g"),
            (("a10g", "tiny"), "unknown --model 'tiny'; there are llama-3.2-3b"),
            (("a10g", "llama-3.2-3b", None, 0.0), "--time-scale must be a number above 0, not 0.0"),
        ],
    )
    def test_what_cannot_be_emulated(self, given: tuple, said: str) -> None:
        with pytest.raises(ValueError, match=said):
            Emulation(*given)


class TestClock:
    steps = st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0.0, 2.0)), min_size=1, max_size=20)

    @given(steps)
    def test_steps_run_one_after_another_and_none_before_it_is_launched(
        self, steps: list[tuple[float, float]]
    ) -> None:
        clock, now_s, before_s, stalled_s = GpuClock(), 1.0, 1.0, 0.0
        for takes_s, later_s in steps:
            now_s += later_s
            end_s = clock.launch(takes_s, now_s=now_s, cpu_s=0.0, after_idle=False)
            assert end_s == pytest.approx(max(before_s, now_s) + takes_s)
            stalled_s += max(0.0, now_s - before_s) if before_s > 1.0 else 0.0
            before_s = end_s
        report = clock.report()
        assert report["steps"] == len(steps)
        assert report["busy_s"] == pytest.approx(sum(takes_s for takes_s, _ in steps))
        assert report["stalled_s"] == pytest.approx(stalled_s)

    def test_waiting_for_requests_is_no_stall(self) -> None:
        clock = GpuClock()
        clock.launch(1.0, now_s=0.0, cpu_s=5.0, after_idle=True)
        clock.launch(1.0, now_s=10.0, cpu_s=6.0, after_idle=True)
        clock.launch(1.0, now_s=11.5, cpu_s=6.25, after_idle=False)
        report = clock.report()
        assert (report["stalled_s"], report["scheduler_cpu_s"]) == (0.5, 0.25)

    def test_lateness(self) -> None:
        clock = GpuClock()
        assert clock.report()["late_p99_s"] is None
        for late_s in (0.0, 0.5, -1.0, 0.25):
            end_s = clock.launch(1.0, now_s=0.0, cpu_s=0.0, after_idle=False)
            clock.ended(end_s, now_s=end_s + late_s)
        report = clock.report()
        assert (report["late_s"], report["late_max_s"]) == (0.75, 0.5)
        assert report["late_p99_s"] in (0.25, 0.5)

    def test_a_run_s_timing_in_words(self) -> None:
        idle = GpuClock().report()
        clock = GpuClock()
        clock.launch(1.0, now_s=0.0, cpu_s=0.0, after_idle=True)
        end_s = clock.launch(1.0, now_s=1.5, cpu_s=0.004, after_idle=False)
        clock.ended(end_s, now_s=end_s + 0.002)
        passed = since(clock.report(), idle)
        assert in_words([passed, since(idle, idle)]) == (
            "emulated GPUs stalled for 25.0% of their time at most; their 2 steps were read 1.00 ms late "
            "and cost 2.00 ms of scheduling each"
        )
        assert in_words([since(idle, idle)]) == "no step was run"


class TestFolder:
    def test_a_token_is_a_byte(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from tokenizers import Tokenizer

        monkeypatch.setenv("SGLANG_FAIR_CACHE", str(tmp_path))
        model = models.find("emulated:llama-3.1-8b")
        tokenizer = Tokenizer.from_file(f"{model.path}/tokenizer.json")
        text = "Zürich,\n42 \x00é ~"
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
        assert tokenizer.decode(list(range(97, 123))) == "abcdefghijklmnopqrstuvwxyz"
        assert tokenizer.encode("<|im_end|>").ids == [259]
        assert json.loads(Path(model.path, "config.json").read_text())["vocab_size"] == 128_256
        assert model.context_tokens == 131_072

    def test_another_model_is_none_of_ours(self) -> None:
        with pytest.raises(ValueError, match=r"unknown model 'gpt' to emulate; there are llama-3\.2-3b"):
            models.find("emulated:gpt")


class TestReplicaArguments:
    model = models.ServedModel("emulated:llama-3.1-8b", "/m", "llama-3.1-8b-emulated", "dummy", 1, 131_072)

    def test_memory_and_chunks_are_the_gpu_s(self) -> None:
        options = replica.parse(
            ["--engine", "emulated", "--gpu", "a100-80g", "--model", "llama-3.1-8b", "--", "--x"]
        )
        argv = replica.server_arguments(options, self.model)
        assert argv[argv.index("--max-total-tokens") + 1] == str(A100.kv_tokens)
        assert argv[argv.index("--chunked-prefill-size") + 1] == "8192"
        assert argv[argv.index("--max-running-requests") + 1] == "256"
        assert argv[-1] == "--x"
        assert "--disable-overlap-schedule" not in argv
        assert settings.read(replica.environment(options)) == A100

    def test_the_user_s_numbers_win(self) -> None:
        options = replica.parse([*EMULATED, "--kv-tokens", "4096", "--max-running", "3"])
        argv = replica.server_arguments(options, self.model)
        assert argv[argv.index("--max-total-tokens") + 1] == "4096"
        assert argv[argv.index("--max-running-requests") + 1] == "3"

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--gpu", "a10g"], "--gpu is for --engine emulated"),
            (["--time-scale", "2"], "--time-scale is for --engine emulated"),
            (["--engine", "emulated", "--model", "llama-2-7b"], "unknown --gpu ''; there are a10g"),
            ([*EMULATED, "--cost-model", "/no/such.json"], "cannot read /no/such.json"),
        ],
    )
    def test_what_does_not_fit_together(self, arguments: list[str], said: str) -> None:
        options = replica.parse(arguments)
        with pytest.raises(ValueError, match=said):
            replica.server_arguments(options, self.model)


class TestPlan:
    machine = Machine(2, 16 * 10**9, (), False, "python")
    model = Model(Path("/m"), "llama-3.1-8b-emulated", 350_000_000)
    ports = Ports(gateway=8000, router=30000, replicas=(ReplicaPorts(30001, 30002),) * 2)
    options = Options(engine="emulated", gpu="a100-80g", model="llama-3.1-8b", time_scale=0.5)

    def test_the_fork_server_comes_first_and_forks_the_replicas(self) -> None:
        check(self.options)
        fork_server, r0, r1, *_ = build(self.options, "cpu", self.machine, self.model, self.ports).processes
        assert (fork_server.role, fork_server.fork_server, fork_server.argv[2]) == (
            "fork-server",
            None,
            "sglang_fair.engines.fork_server",
        )
        assert r0.fork_server == r1.fork_server == fork_server.argv[3]
        shared = replica.parse(fork_server.argv[4:])
        own = replica.parse(r1.argv)
        assert own.name == "r1"
        assert replica.emulation(shared) == replica.emulation(own) == self.options.emulation()
        assert own.extra[:1] == ("--log-level",)
        assert fork_server.ready == LineReady("ready to fork replicas")

    def test_a_real_engine_has_none(self) -> None:
        plan = build(Options(), "cpu", self.machine, self.model, self.ports)
        assert plan.of("fork-server") == ()
        assert all(process.fork_server is None for process in plan.processes)

    def test_what_they_share_counts_once(self) -> None:
        check_memory(Options(**{**vars(self.options), "replicas": 40}), "cpu", self.machine, self.model)
        with pytest.raises(ConfigError, match="41 would fit"):
            check_memory(Options(**{**vars(self.options), "replicas": 60}), "cpu", self.machine, self.model)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (Options(engine="magic"), "unknown --engine 'magic'; there are auto, cuda, cpu, emulated"),
            (Options(engine="emulated"), "unknown --gpu ''; there are a10g, a100-80g, h100, h200"),
            (Options(engine="emulated", gpu="h100"), "unknown --model 'default'; there are llama-3.2-3b"),
            (Options(gpu="h100"), "--gpu is for --engine emulated"),
            (Options(engine="cpu", device="cuda"), "--engine cpu and --device cuda contradict each other"),
            (
                Options(engine="emulated", gpu="h100", model="llama-2-7b", extra=("--tp", "2")),
                "an emulated replica is one GPU",
            ),
            (
                Options(engine="emulated", gpu="h100", model="llama-2-7b", cost_model="/none.json"),
                "cannot read /none.json",
            ),
        ],
    )
    def test_what_cannot_be_is_refused_in_one_line(self, options: Options, said: str) -> None:
        with pytest.raises(ConfigError) as refused:
            check(options)
        assert said in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
    def test_a_device_alone_says_enough(self, device: str) -> None:
        check(Options(device=device))


FAKE_FORK_SERVER = """
import os, signal, socket, subprocess, sys, time
from sglang_fair.engines import fork_server
from sglang_fair.engines import replica

def main(argv):
    print("I am", *argv, os.environ["SAID"], flush=True)
    if argv[0] == "sleeps":
        child = subprocess.Popen(["sleep", "60"])
        print("child", child.pid, flush=True)
        child.wait()
    return int(argv[1])

def slowly(make_session=os.setsid):
    time.sleep(0.5)
    make_session()

def fork_slowly(fork=os.fork):
    pid = fork()
    if pid == 0:
        time.sleep(0.5)
    return pid

replica.main = main
if "slowly" in sys.argv:
    os.setsid = slowly
if "forks slowly" in sys.argv:
    os.fork = fork_slowly
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
    listener.bind("\\0" + sys.argv[1])
    listener.listen()
    print("ready to fork replicas", flush=True)
    fork_server.ForkServer(listener).run()
"""


@contextmanager
def fake_fork_server(name: str, *how: str) -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(
        [sys.executable, "-c", FAKE_FORK_SERVER, name, *how], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets are Linux's")
class TestForkServer:
    @staticmethod
    def spec(fork_server: str, *argv: str) -> Process:
        return Process("r0", "replica", argv, LineReady("x"), 1.0, 1.0, {"SAID": "hello"}, None, fork_server)

    @staticmethod
    async def started(spec: Process) -> tuple[Child, list[str]]:
        lines: list[str] = []
        return await Child.start(spec, lambda _, line: lines.append(line)), lines

    def test_replicas_have_output_environment_session_and_exit_code_of_their_own(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/a"

        async def both() -> None:
            (first, said), (second, said_too) = await asyncio.gather(
                self.started(self.spec(name, "one", "3")), self.started(self.spec(name, "two", "0"))
            )
            assert first.pid != second.pid
            assert (await first.exited(), await second.exited()) == ("exit code 3", "exit code 0")
            assert (said, said_too) == (["I am one 3 hello"], ["I am two 0 hello"])

        with fake_fork_server(name):
            asyncio.run(both())

    def test_one_that_is_killed_takes_its_session_along_and_not_its_siblings(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/b"

        async def killed() -> None:
            first, said = await self.started(self.spec(name, "sleeps", "0"))
            second, _ = await self.started(self.spec(name, "sleeps", "0"))
            await first.saw("child")
            grandchild = int(said[-1].split()[1])
            assert os.getsid(grandchild) == first.pid != os.getsid(os.getpid())
            os.kill(first.pid, signal.SIGKILL)
            assert await first.exited() == "killed by SIGKILL"
            assert not lives(grandchild)
            assert second.running
            await second.stop(asyncio.Event())
            assert not lives(second.pid)

        with fake_fork_server(name):
            asyncio.run(killed())

    def test_a_signal_that_comes_before_a_replica_has_begun_ends_it_and_not_its_siblings(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/f"

        async def killed() -> None:
            first, _ = await self.started(self.spec(name, "sleeps", "0"))
            await first.saw("child")
            second, _ = await self.started(self.spec(name, "sleeps", "0"))
            os.kill(second.pid, signal.SIGTERM)
            assert await second.exited() == "killed by SIGTERM"
            assert lives(first.pid)
            await first.stop(asyncio.Event())

        with fake_fork_server(name, "forks slowly"):
            asyncio.run(killed())

    @pytest.mark.parametrize("how", [(), ("slowly",)], ids=["its session is there", "not yet"])
    def test_whoever_asked_is_gone(self, how: tuple[str, ...]) -> None:
        name = f"sglang-fair-test/{os.getpid()}/c"
        with fake_fork_server(name, *how), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0{name}")
            wanted = {"argv": ["sleeps", "0"], "env": {"SAID": "x"}}
            socket.send_fds(connection, [json.dumps(wanted).encode()], [2])
            pid = json.loads(connection.recv(4096))["pid"]
            assert lives(pid)
            connection.close()
            wait_until(lambda: not lives(pid), "the orphan's end", 10.0)

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_a_fork_server_that_ends_takes_its_replicas_along(self, number: signal.Signals) -> None:
        name = f"sglang-fair-test/{os.getpid()}/d"

        async def orphaned(fork_server: "subprocess.Popen[bytes]") -> None:
            child, _ = await self.started(self.spec(name, "sleeps", "0"))
            await child.saw("child")
            fork_server.send_signal(number)
            assert await child.exited() == "killed by SIGKILL"
            assert not lives(child.pid)

        with fake_fork_server(name) as fork_server:
            asyncio.run(orphaned(fork_server))

    def test_a_fork_server_that_is_still_importing_is_waited_for(self) -> None:
        name = f"sglang-fair-test/{os.getpid()}/e"

        async def early() -> None:
            starting = asyncio.create_task(self.started(self.spec(name, "one", "0")))
            await asyncio.sleep(0.3)
            with fake_fork_server(name):
                child, _ = await starting
                assert await child.exited() == "exit code 0"

        asyncio.run(early())


@pytest.fixture(scope="module")
def emulated() -> Iterator[Replica]:
    with Replica(*EMULATED, "--policy", "dlpm") as one:
        yield one


def tokens_of(one: Replica, prompt: list[int], output_tokens: int) -> tuple[list[int], dict]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": output_tokens}}
    told = httpx.post(f"{one.url}/generate", json=body, timeout=60).json()
    return told["output_ids"], told["meta_info"]


@pytest.mark.engine
class TestReplica:
    def test_it_says_that_it_is_emulated(self, emulated: Replica) -> None:
        fair = emulated.fair()
        assert fair["policy"] == "dlpm"
        assert (fair["emulated"]["gpu"], fair["emulated"]["model"]) == ("a10g", "llama-3.2-3b")
        assert fair["emulated"]["time_scale"] == 1.0
        assert fair["emulated"]["cost"] == to_json(make_cost_model("a10g/llama-3.2-3b"))
        info = httpx.get(f"{emulated.url}/server_info", timeout=30).json()
        assert info["internal_states"][0]["emulated"]["gpu"] == "a10g"
        assert "emulated a10g with llama-3.2-3b" in emulated.log.read_text()

    def test_it_has_the_gpu_s_memory_and_the_model_s_context(self, emulated: Replica) -> None:
        info = httpx.get(f"{emulated.url}/server_info", timeout=30).json()
        pool = Emulation("a10g", "llama-3.2-3b").kv_tokens
        assert pool - 16 < info["max_total_num_tokens"] <= pool
        listed = httpx.get(f"{emulated.url}/v1/models", timeout=30).json()["data"][0]
        assert listed["id"] == "llama-3.2-3b-emulated"
        assert listed["max_model_len"] == 131_072

    def test_its_words_follow_from_the_prompt_and_end_at_the_limit(self, emulated: Replica) -> None:
        prompt = list(range(1000, 1700))
        said, info = tokens_of(emulated, prompt, 48)
        expected = np.frombuffer(answer(np.array(prompt, "<u4").tobytes(), 48), "<u4")
        assert said == expected.tolist()
        assert info["finish_reason"] == {"type": "length", "length": 48}
        again, info = tokens_of(emulated, prompt, 20)
        assert again == said[:20]
        assert info["cached_tokens"] == 688  # whole pages of what is not the last token
        next_turn, info = tokens_of(emulated, [*prompt, *said, 5, 6, 7], 4)
        assert info["cached_tokens"] >= 736
        assert next_turn != said[:4]

    def test_a_request_takes_what_the_cost_model_says(self, emulated: Replica) -> None:
        cost = make_cost_model("a10g/llama-3.2-3b")
        prompt, outputs = list(range(20_000, 24_000)), 100
        least_s = cost.prefill_s([(4000, 0)]) + cost.decode_run_s(1, 4001, outputs - 1)
        before = emulated.fair()["emulated"]
        began_s = time.monotonic()
        tokens_of(emulated, prompt, outputs)
        took_s = time.monotonic() - began_s
        after = emulated.fair()["emulated"]
        busy_s = after["busy_s"] - before["busy_s"]
        assert busy_s >= 0.999 * least_s
        assert busy_s <= 1.05 * least_s  # an overlapped scheduler may begin one step too many
        assert least_s <= took_s < 10 * least_s
        assert after["steps"] - before["steps"] in (outputs, outputs + 1)
        assert after["scheduler_cpu_s"] > 0

    def test_text_and_chat(self, emulated: Replica) -> None:
        body = {"model": "llama-3.2-3b-emulated", "prompt": "Once", "max_tokens": 12}
        told = httpx.post(f"{emulated.url}/v1/completions", json=body, timeout=60).json()
        prompt = np.frombuffer(b"Once", "u1").astype("<u4").tobytes()
        said = np.frombuffer(answer(prompt, 12), "<u4").astype("u1").tobytes()
        assert told["choices"][0]["text"].encode() == said
        chat = {"model": "x", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        told = httpx.post(f"{emulated.url}/v1/chat/completions", json=chat, timeout=60).json()
        assert told["choices"][0]["message"]["content"].isalpha()
        assert told["usage"]["completion_tokens"] == 5

    def test_what_needs_logits_is_refused_and_does_no_harm(self, emulated: Replica) -> None:
        for more, said in (
            ({"return_logprob": True}, "no logits"),
            ({"sampling_params": {"regex": "a+"}}, "not"),
        ):
            answered = httpx.post(
                f"{emulated.url}/generate", json={"input_ids": [1, 2, 3], **more}, timeout=60
            )
            assert answered.status_code == 400, answered.text
            assert said in answered.text
        assert tokens_of(emulated, [1, 2, 3], 2)[1]["completion_tokens"] == 2


@pytest.mark.engine
def test_without_its_hooks_the_model_cannot_be_loaded() -> None:
    """As if SGLang's loader had only logged that the plugin failed."""
    load = "from sglang_fair.engines.emulated.networks.nothing import EntryClass; EntryClass(None)"
    variables = {**os.environ, **settings.environment(Emulation("a10g", "llama-3.2-3b"))}
    setup = "from sglang_fair.engines.cpu import define_torchvision_operators as o; o(); "
    ended = subprocess.run(
        [sys.executable, "-c", setup + load], capture_output=True, text=True, check=False, env=variables
    )
    assert ended.returncode == 1
    assert "SGLang did not apply the hooks on sglang.srt.managers.tp_worker" in ended.stderr


@pytest.mark.e2e
def test_a_cluster_forks_its_replicas_and_one_that_is_killed_returns() -> None:
    with Cluster("--engine", "emulated", "--gpu", "a10g", "--model", "llama-3.2-3b") as cluster:
        facts = cluster.addresses
        assert facts["emulated"]["gpu"] == "a10g"
        assert "emulated a10g with llama-3.2-3b" in cluster.log.read_text()
        assert psutil.Process(facts["pids"]["r0"]).ppid() == facts["pids"]["fork-server"]
        body = {"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        ask = f"{cluster.url}/v1/chat/completions"
        first = httpx.post(ask, json=body, timeout=60).json()["choices"][0]["message"]["content"]
        assert [books["policy"] for books in cluster.books()] == ["dlpm", "dlpm"]
        os.kill(facts["pids"]["r0"], signal.SIGKILL)
        wait_until(lambda: "r0 ended: killed by SIGKILL" in cluster.log.read_text(), "the death of r0", 30.0)
        wait_until(lambda: cluster.log.read_text().count("r0 is ready") == 2, "r0's return", 120.0)
        for _ in range(4):
            told = httpx.post(ask, json=body, timeout=60).json()
            assert told["choices"][0]["message"]["content"] == first
