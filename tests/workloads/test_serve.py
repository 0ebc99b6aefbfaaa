"""`bench serve`: who is asked for, how it is sent, what is reported. Endpoints are stand-ins in a thread."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import request as record
from tests.support.stand_in import MODEL, make_tokenizer
from tests.workloads.peer import Peer
from workloads import wire
from workloads.endpoints import EndpointError, find_model, identity, read_keys
from workloads.fairness_report import failures, fairness_report
from workloads.load import ClientSpec, LoadOptions, load_trace, read_trace
from workloads.programs import Execution, TextCodec
from workloads.records import End, Manifest, ProgramRecord, RequestRecord, Run, read
from workloads.serve import ServeOptions, main


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


SHORT = "--seed 0 --duration 0.15 --warm-up 0.05 --drain 60 --input 16 --output 4 --cv 0"


def bench(
    capsys: pytest.CaptureFixture[str], peer: Peer, *words: str, status: int = 0
) -> tuple[dict[str, Any], str]:
    """The last line of stdout of a short load on `peer`, and stderr."""
    with peer.serve() as url:
        assert main(["--url", url, *SHORT.split(), *words]) == status
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    return json.loads(line), " ".join(said.err.split())


def rows(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {client["client"]: client for client in told["report"]["clients"]}


# ---- whole loads


def test_an_open_loop_load_reports_each_client_without_the_warm_up(tokenizer, tmp_path, capsys):
    path, copy = tmp_path / "records.jsonl", tmp_path / "result.json"
    told, said = bench(
        capsys, Peer(tokenizer), "--clients", "a:rate=80", "b:rate=160,weight=3", "--records", str(path),
        "--json", str(copy),
    )  # fmt: skip
    assert (told["bench"], told["loop"], told["interrupted"]) == ("serve", "open", False)
    assert json.loads(copy.read_text()) == told
    found = rows(told)
    assert {name: row["requests"] for name, row in found.items()} == {"a": 12, "b": 24}
    assert {name: row["ok"] for name, row in found.items()} == {"a": 12, "b": 24}
    assert [row["fair_share"] for row in found.values()] == [0.25, 0.75]
    run = read(path)
    expected = fairness_report(run, warm_up_s=0.05, weights={"b": 3.0})
    assert [row["share"] for row in found.values()] == [client.share for client in expected.clients]
    assert found["a"]["hit_rate"] == 0.0
    assert found["a"]["ttft_p50"]["value_s"] < found["a"]["program_p50"]["value_s"]
    assert told["report"]["span_s"] == [0.05, pytest.approx(0.2)]
    assert len(run.requests) == 48, "the warm-up is in the records"
    assert run.end is not None
    for text in ("fair share", "whether or not it could be sent", "Jain"):
        assert text in said


def test_a_second_run_sends_other_prompts_unless_it_is_given_the_seed_of_the_first():
    first, second = (ServeOptions(url="http://host", rate=1) for _ in range(2))
    again = ServeOptions(url="http://host", rate=1, seed=first.seed)

    def prompts(options: ServeOptions) -> list[object]:
        (client, *_) = options.load(TextCodec(), 1.0).clients
        return [call.prompt for index in range(3) for _, call in Execution(client.program(index)).start()]

    assert prompts(first) == prompts(again) != prompts(second)


@pytest.mark.parametrize("api", list(wire.PATHS))
def test_every_interface_is_driven(api, tokenizer, capsys, tmp_path):
    peer, path = Peer(tokenizer), tmp_path / "records.jsonl"
    told, _ = bench(capsys, peer, "--api", api, "--clients", "a:rate=40", "--records", str(path))
    assert told["report"]["clients"][0]["ok"] == 6
    tokens = 0 if api in wire.WHOLE else 4
    records = read(path).requests
    assert {(record.outcome, record.output_tokens) for record in records} == {("ok", tokens)}
    assert all(record.prompt_tokens and record.prompt_tokens > 8 for record in records)
    assert told["case"]["model"] == MODEL


@pytest.mark.parametrize(
    ("place", "header", "value"),
    [
        ("fair", "x-fair-client", "a"),
        ("tenant", "x-tenant-id", "a"),
        ("smg", "x-smg-tenant-id", "a"),
        ("llm-d", "x-llm-d-inference-fairness-id", "a"),
        ("gateway-api", "x-gateway-inference-fairness-id", "a"),
        ("header:x-me", "x-me", "a"),
        ("api-key", "authorization", "Bearer a"),
    ],
)
def test_clients_are_named_where_the_endpoint_looks(place, header, value, tokenizer, capsys):
    peer = Peer(tokenizer)
    bench(
        capsys, peer, "--identity", place, "--clients", "a:rate=100", "--duration", "0.05", "--warm-up", "0"
    )
    assert {sent.get(header) for sent in peer.headers} == {value}
    named = [name for name in peer.headers[0] if "fair" in name or "tenant" in name]
    if place == "fair":
        assert {"x-fair-app", "x-fair-client"} <= set(named)
    else:
        assert named == ([header] if "fair" in header or "tenant" in header else [])


def test_a_closed_loop_load(tokenizer, capsys):
    peer = Peer(tokenizer, step_s=0.02)
    words = ("--clients", "a:concurrency=3", "b", "--concurrency", "1", "--warm-up", "0")
    told, said = bench(capsys, peer, *words)
    assert told["loop"] == "closed"
    assert peer.most_at_once == 4
    assert rows(told)["a"]["ok"] >= 3
    assert rows(told)["b"]["ok"] >= 1
    assert "a slow server is asked for less" in said


def test_token_ids_are_sent_where_there_is_a_tokenizer(tokenizer, capsys):
    peer = Peer(tokenizer)
    told, _ = bench(
        capsys, peer, "--tokenizer", str(tokenizer), "--clients", "a:rate=40,input=20,prefix=8", "b:rate=20"
    )
    lengths = {len(body["prompt"]) for body in peer.bodies}
    assert lengths == {16, 20}
    prefixes = {tuple(body["prompt"][:8]) for body in peer.bodies if len(body["prompt"]) == 20}
    assert len(prefixes) == 1
    assert told["case"]["token_ids"]


def test_questions_and_articles_may_come_from_files(tokenizer, capsys, tmp_path):
    questions, articles = tmp_path / "questions.jsonl", tmp_path / "articles.txt"
    questions.write_text(json.dumps({"question": "How many doves are seven doves?"}) + "\n")
    articles.write_text("A quiet day at the dovecote.")
    for words in (("tot-s1", "--questions", str(questions)), ("judge-s1", "--articles", str(articles))):
        peer = Peer(tokenizer)
        peer.interrupt_after = 10
        asked = ("--clients", "1", "--rate", "5", "--warm-up", "0", "--workload", *words)
        told, _ = bench(capsys, peer, *asked, status=130)
        assert all("dove" in body["prompt"] for body in peer.bodies)
        assert told["case"]["texts"] == words[2]
    assert main(["--url", "http://nowhere", "--workload", "judge-s1", "--questions", str(questions)]) == 2
    assert "--questions are for tot-s1 and tot-s2" in capsys.readouterr().err


def test_a_trace_is_replayed(tokenizer, capsys, tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 0.06 + 0.025 * k, "client": "ab"[k % 2], "input_tokens": 9, "output_tokens": 2}
        for k in range(20)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    told, _ = bench(
        capsys, Peer(tokenizer), "--workload", "trace", "--trace", str(path), "--clients", "b:weight=2"
    )
    assert {name: row["ok"] for name, row in rows(told).items()} == {"a": 3, "b": 3}
    assert {name: row["weight"] for name, row in rows(told).items()} == {"a": 1, "b": 2}


# ---- what goes wrong


def test_refusals_are_counted_apart(tokenizer, capsys):
    peer = Peer(tokenizer)
    peer.refused = {"b"}
    told, said = bench(capsys, peer, "--clients", "a:rate=40", "b:rate=40")
    (failure,) = told["report"]["failures"]
    found = [failure[name] for name in ("kind", "status", "count", "clients")]
    assert found == ["refused", 429, 6, {"b": 6}]
    assert rows(told)["b"]["program_p50"] is None
    assert "6 × refused (HTTP 429): b 6; the first: HTTP 429: too many requests" in said


def test_what_the_endpoint_does_not_tell_is_missing_and_not_zero(tokenizer, capsys):
    told, said = bench(capsys, Peer(tokenizer, usage=False), "--clients", "a:rate=40")
    row = rows(told)["a"]
    assert row["ok"] == 6
    assert [row[name] for name in ("service_rate", "requested_rate", "share", "hit_rate")] == [None] * 4
    assert told["report"]["tokens_per_s"] is None
    assert row["ttft_p50"] is not None
    assert "did not say how long prompts were" in said


def test_ctrl_c_ends_with_the_report_of_what_there_is(tokenizer, capsys):
    peer = Peer(tokenizer)
    peer.interrupt_after = 12
    told, _ = bench(capsys, peer, "--clients", "a:rate=80", "--duration", "60", status=130)
    assert told["interrupted"]
    assert 5 <= rows(told)["a"]["requests"] < 80 * 30


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--clients", "a"], "needs a rate"),
        (["--clients", "a", "a", "--rate", "1"], "names of their own"),
        (["--clients", "a:rate=1,concurrency=2"], "not both"),
        (["--clients", "a:speed=1"], "unknown key 'speed'"),
        (["--clients", "a:rate=1,rate=2"], "client a: option 'rate' is given twice"),
        (["--clients", "a:rate=fast"], "client a: rate must be a number, not 'fast'"),
        (["--rate", "1", "--concurrency", "1"], "not both"),
        (["--rate", "0"], "rate must be positive, not 0.0"),
        (["--concurrency", "0"], "concurrency must be positive, not 0"),
        (["--workload", "tot-s1", "--questions", "/nowhere"], "No such file"),
        (["--rate", "1", "--cost", "free"], "unknown cost"),
        (["--rate", "1", "--url", "http://127.0.0.1:9"], "there is no endpoint at http://127.0.0.1:9"),
        (["--rate", "1", "--identity", "passport"], "unknown identity"),
        (["--rate", "1", "--model", "gpt-9"], "has no model 'gpt-9'; there are tiny"),
        (["--rate", "1", "--keys", "/nowhere"], "No such file"),
        (["--workload", "chat", "--clients", "a:rate=1,input=3"], "lengths of the workload single"),
        (["--workload", "trace", "--trace", "/nowhere"], "No such file"),
    ],
)
def test_bad_input_is_one_line(words, error, tokenizer, capsys):
    peer = Peer(tokenizer)
    with peer.serve() as url:
        assert main(["--url", url, *words]) == 2
    said = capsys.readouterr()
    assert error in said.err
    assert said.err.count("\n") == 1
    assert not peer.bodies


# ---- models and identities


def test_the_model_is_the_only_one_or_the_one_that_is_named(tokenizer):
    peer = Peer(tokenizer)
    with peer.serve() as url:
        assert asyncio.run(find_model(url, None)) == MODEL
        assert asyncio.run(find_model(url + "/", MODEL)) == MODEL
        peer.models = ["x", "y"]
        assert asyncio.run(find_model(url, "y")) == "y"
        with pytest.raises(EndpointError, match="several models, name one: x, y"):
            asyncio.run(find_model(url, None))
        assert asyncio.run(find_model(url + "/elsewhere", None)) is None, "it does not list its models"


def test_keys_come_from_a_file_and_belong_to_clients(tmp_path):
    path = tmp_path / "keys.json"
    path.write_text('{"a": "of-a"}')
    assert identity("api-key", ["a", "b"], read_keys(path))["api_keys"] == {"a": "of-a", "b": "b"}
    with pytest.raises(ValueError, match="that there are not: a"):
        identity("api-key", ["b"], read_keys(path))
    with pytest.raises(ValueError, match="belong to the identity api-key"):
        identity("smg", ["a"], read_keys(path))
    path.write_text("[]")
    with pytest.raises(ValueError, match="JSON object"):
        read_keys(path)


# ---- loads


def test_a_trace_takes_weights_and_nothing_else():
    traffic = LoadOptions(workload="trace", trace="arena", rate=5.0)
    trace = read_trace("arena", traffic, 20.0)
    assert trace.duration_s == pytest.approx(20.0)
    name = trace.requests[0].client
    assert load_trace(trace, [ClientSpec(name, weight=2.0)], traffic, TextCodec()).weights[name] == 2.0
    for spec in (ClientSpec(name, rate=1.0), ClientSpec("nobody")):
        with pytest.raises(ValueError, match=spec.name):
            load_trace(trace, [spec], traffic, TextCodec())
    with pytest.raises(ValueError, match="open loop"):
        load_trace(trace, [], LoadOptions(workload="trace", trace="arena", concurrency=2), TextCodec())


# ---- the report


def request(client: str, due: float, first: float | None, done: float, **changes: Any) -> RequestRecord:
    """10 tokens of prompt, 5 of output, half of them at the end."""
    lengths = {"prompt_tokens": 10, "cached_tokens": 4, "max_output_tokens": 5, "status": 200}
    if first is None:
        return record(
            client, due, first, done, **{**lengths, "outcome": "cancelled", "output_tokens": 0, **changes}
        )
    return record(client, due, first, done, **{**lengths, "token_times": ((first, 1), (done, 5)), **changes})


def run_of(*rows: RequestRecord | ProgramRecord, end_s: float = 20.0) -> Run:
    run = Run(Manifest("w", "s", {"a": {}, "b": {}}, 10.0))
    for row in (*rows, End(end_s)):
        run.add(row)
    return run


def test_the_warm_up_is_in_no_number():
    early = (
        request("a", 1.0, 1.5, 1.9),
        request("a", 1.0, None, 1.2, outcome="failed", status=500, error="HTTP 500"),
    )
    late = (request("a", 3.0, 4.0, 5.0), request("b", 3.0, 3.5, 4.0))
    report = fairness_report(run_of(*early, *late), warm_up_s=2.0)
    assert report == fairness_report(run_of(*late), warm_up_s=2.0)
    assert report.clients[0].service_rate == pytest.approx(20 / 8)
    assert report.tokens_per_s == pytest.approx(30 / 8)


def test_requests_that_the_end_cut_off_make_percentiles_lower_bounds():
    report = fairness_report(run_of(request("a", 3.0, None, 20.0), request("a", 3.0, 3.5, 4.0)))
    first = report.clients[0]
    assert (first.cut_off, first.ttft_p99.value_s, first.ttft_p99.at_least) == (1, 17.0, True)
    assert not first.ttft_p50.at_least


@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (429, "HTTP 429: slow down", "refused"),
        (500, "HTTP 500: oops", "HTTP error"),
        (None, "ClientConnectorError: cannot connect", "no connection"),
        (None, "no answer within 5 s", "time-out"),
        (200, "no answer within 5 s", "time-out"),
        (200, "the stream ended before the answer did", "broken off"),
        (200, "ClientPayloadError: not complete", "broken off"),
        (200, "aborted by the server: too long", "error in the answer"),
    ],
)
def test_failures_by_kind(status, error, kind):
    failed = [request("a", 1.0, None, 2.0, outcome="failed", status=status, error=error)] * 2
    (failure,) = failures([*failed, request("a", 1.0, 1.5, 2.0)])
    assert (failure.kind, failure.status, failure.count, failure.example) == (kind, status, 2, error)
