"""The emulated GPU: what it makes of a GPU's name, what its processes are told, and a replica and a cluster of it."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from sglang_fair.cluster.gpus import Machine
from sglang_fair.cluster.options import ConfigError, Options, check
from sglang_fair.cluster.plan import Model, build
from sglang_fair.cluster.ports import Ports, ReplicaPorts
from sglang_fair.engines import emulated as settings
from sglang_fair.engines import replica
from sglang_fair.models import catalog as models
from sglang_fair.sim.answers import answer
from sglang_fair.sim.cost_model import make_cost_model, to_json
from sglang_fair.sim.emulation import Emulation
from tests.support import fork_server
from tests.support.live import Replica

A100 = Emulation("a100-80g", "llama-3.1-8b")
EMULATED = ("--engine", "emulated", "--gpu", "a10g", "--model", "llama-3.2-3b")


class TestReplicaArguments:
    model = models.ServedModel("emulated:llama-3.1-8b", "/m", "llama-3.1-8b-emulated", "dummy", 1)

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


class TestPlan:
    machine = Machine(2, (), False, "python")
    model = Model(Path("/m"), "llama-3.1-8b-emulated")
    ports = Ports(gateway=8000, router=30000, replicas=(ReplicaPorts(30001, 30002, 30004),) * 2)
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
        assert fork_server.ready == "ready to fork replicas"

    def test_replicas_on_gpus_have_none(self) -> None:
        plan = build(Options(), "cuda", self.machine, self.model, self.ports)
        assert plan.of("fork-server") == ()
        assert all(process.fork_server is None for process in plan.processes)

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


@pytest.fixture(scope="module")
def emulated() -> Iterator[Replica]:
    with Replica(*EMULATED, "--policy", "dlpm") as one:
        yield one


def tokens_of(one: Replica, prompt: list[int], output_tokens: int) -> tuple[list[int], dict]:
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": output_tokens}}
    told = httpx.post(f"{one.url}/generate", json=body, timeout=60).json()
    return told["output_ids"], told["meta_info"]


@pytest.mark.engine
@pytest.mark.timeout(900)
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

    @pytest.mark.parametrize("known", [1, 30])
    def test_behind_what_another_replica_has_answered_it_goes_on_with_the_same_words(
        self, emulated: Replica, known: int
    ) -> None:
        prompt = [5, 6, 7, *range(97, 110)]
        said, _ = tokens_of(emulated, prompt, 48)
        assert tokens_of(emulated, [*prompt, *said[:known]], 48 - known)[0] == said[known:]

    def test_a_request_takes_what_the_cost_model_says(self, emulated: Replica) -> None:
        cost = make_cost_model("a10g/llama-3.2-3b")
        prompt, outputs = list(range(20_000, 24_000)), 100
        least_s = cost.prefill_s([(4000, 0)]) + cost.decode_s(1, 4001, outputs - 1)
        before = emulated.fair()["emulated"]
        began_s = time.monotonic()
        tokens_of(emulated, prompt, outputs)
        took_s = time.monotonic() - began_s
        after = emulated.fair()["emulated"]
        busy_s = after["busy_s"] - before["busy_s"]
        assert busy_s >= 0.999 * least_s
        assert busy_s <= 1.05 * least_s  # an overlapped scheduler may begin one step too many
        assert took_s >= least_s
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


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("ids", [[0, 128_256], [-1, 5], [2**40]])
def test_token_ids_that_there_are_not_end_it_as_they_do_a_real_engine(ids: list[int]) -> None:
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from sglang_fair.engines.emulated.hooks import EmulatedGpu

    def launch(ids: list[int]) -> None:
        tensor, lengths = torch.tensor(ids), torch.tensor([len(ids)])
        request = SimpleNamespace(origin_input_ids=ids, sampling_params=SimpleNamespace(max_new_tokens=4))
        batch = SimpleNamespace(
            seq_lens_cpu=lengths, forward_mode=ForwardMode.EXTEND, input_ids=tensor, extend_lens=[len(ids)],
            prefix_lens=[0], after_idle_gap=True, reqs=[request],
        )  # fmt: skip
        EmulatedGpu(A100, 128_256).run(batch)

    launch([0, 128_255])
    with pytest.raises(IndexError):
        launch(ids)


@pytest.mark.engine
def test_without_its_hooks_the_model_cannot_be_loaded() -> None:
    """As if SGLang's loader had only logged that the plugin failed."""
    load = "from sglang_fair.engines.emulated.networks.nothing import EntryClass; EntryClass(None)"
    variables = settings.environment(Emulation("a10g", "llama-3.2-3b"))
    ended = fork_server.run("-c", load, environment=variables)
    assert ended.returncode == 1
    assert "SGLang did not apply the hooks on sglang.srt.managers.tp_worker" in ended.stderr
