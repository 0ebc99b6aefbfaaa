"""Explained through the gateway: what gateway, router and a real replica say of one request, and to whom."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.processes import child_environment
from sglang_fair.common.service_keys import replica_key
from sglang_fair.tenants import edit, keys
from sglang_fair.tenants.model import Limits, Tenant
from tests.support.live import Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.e2e

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    file = tmp_path_factory.mktemp("tenants") / "tenants.yaml"
    for name, limits in (("light", Limits(requests_per_minute=1000)), ("heavy", Limits())):
        edit.add(file, name, Tenant(keys=[keys.written(keys.digest(name))], weight=3.0, limits=limits))
    environment = {KEY_VARIABLE: "the admin's key", replica_key.variable: "the replicas' key"}
    arguments = ("--replicas", "1", "--tenants", str(file), "--log-format", "json")
    with Cluster(*arguments, environment=environment) as started:
        yield started


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def ask(cluster: Cluster, key: str, name: str, **body: Any) -> httpx.Response:
    body = {"prompt": "some words", "max_tokens": 4, **body}
    headers = bearer(key, **{"x-request-id": name})
    return httpx.post(f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)


def explained(url: str, key: str, id: str) -> httpx.Response:
    return httpx.get(f"{url}/explain/{id}", headers=bearer(key), timeout=TIMEOUT_S)


def test_a_request_is_explained_by_all_three(cluster: Cluster) -> None:
    answer = ask(cluster, "light", "my-request")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "my-request"
    attempt_id = answer.headers["x-fair-request-id"]
    for id in ("my-request", attempt_id):
        for url, key in ((cluster.url, "light"), (cluster.addresses["admin"], "the admin's key")):
            found = explained(url, key, id).json()
            [request] = found["requests"]
            assert found["router"] == ""
            assert (request["client"], request["outcome"], request["gateway"]) == ("light", "ok", True)
            assert request["tokens"]["output"] == 4
            [attempt] = request["attempts"]
            assert attempt["id"] == attempt_id
            assert attempt["router"]["why"] == "only"
            assert attempt["router"]["worker"]["worker"] == attempt["worker"] == "r0"
            [record] = attempt["replica"]
            assert (record["client"], record["outcome"], record["output_tokens"]) == ("light", "finished", 4)
            assert sum(record["waited_for_s"].values()) == pytest.approx(record["waited_s"])


def test_of_several_answers_and_prompts_each_is_explained(cluster: Cluster) -> None:
    for name, more, least in (("answers", {"n": 3}, 3), ("prompts", {"prompt": ["some words", "others"]}, 2)):
        assert ask(cluster, "light", name, **more).status_code == 200
        [request] = explained(cluster.url, "light", name).json()["requests"]
        [attempt] = request["attempts"]
        assert len(attempt["replica"]) >= least
        assert {one["outcome"] for one in attempt["replica"]} == {"finished"}


def test_a_tenant_sees_only_its_own(cluster: Cluster) -> None:
    """Both call a request by one name."""
    for key in ("light", "heavy"):
        assert ask(cluster, key, "same-name").status_code == 200
    for key, other in (("light", "heavy"), ("heavy", "light")):
        text = explained(cluster.url, key, "same-name").text
        assert other not in text
        assert len(json.loads(text)["requests"]) == 1
    assert len(explained(cluster.addresses["admin"], "the admin's key", "same-name").json()["requests"]) == 2
    attempt = ask(cluster, "heavy", "heavys").headers["x-fair-request-id"]
    for id in ("heavys", attempt, "nobodys"):
        assert explained(cluster.url, "light", id).status_code == 404
    for url, key in ((cluster.url, "the admin's key"), (cluster.addresses["admin"], "light")):
        assert explained(url, key, "same-name").status_code == 401
    [replica] = cluster.addresses["replicas"]
    assert explained(replica, "light", attempt).status_code == 401


def test_a_refusal_is_explained_too(cluster: Cluster) -> None:
    answer = ask(cluster, "light", "refused", prompt=7)
    assert answer.status_code == 400
    assert answer.headers["x-request-id"] == "refused"
    [request] = explained(cluster.url, "light", "refused").json()["requests"]
    assert (request["outcome"], request["status"], request["attempts"]) == ("refused", 400, [])
    assert request["error"]


def test_the_command_says_it_in_words(cluster: Cluster) -> None:
    ask(cluster, "light", "in-words")
    environment = {**child_environment(), "OPENAI_API_KEY": "light"}
    environment.pop(KEY_VARIABLE, None)
    command = [sys.executable, "-m", "sglang_fair.cli", "explain", "in-words", "--gateway", cluster.url]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for words in ("request in-words of client light", "router: r0", "replica: waited", "finished"):
        assert words in said
    found = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["requests"][0]["request"] == "in-words"


def test_a_key_holder_sees_what_it_has_had_and_has_left(cluster: Cluster) -> None:
    for _ in range(2):
        ask(cluster, "light", "for-usage")
    usage = httpx.get(f"{cluster.url}/v1/usage", headers=bearer("light"), timeout=TIMEOUT_S).json()
    [book] = cluster.books()
    assert usage["client"] == "light"
    assert usage["weight"] == 3.0
    assert usage["tokens"]["output"] <= book["clients"]["light"]["output_tokens"]
    assert usage["tokens"]["output"] >= 4
    assert 0 < usage["share"] <= 1
    [limit] = usage["limits"]
    assert (limit["name"], limit["limit"]) == ("requests", 1000)
    assert limit["remaining"] < 1000
    assert "heavy" not in json.dumps(usage)
    assert httpx.get(f"{cluster.url}/v1/usage", timeout=TIMEOUT_S).status_code == 401


def test_each_request_is_a_line_of_json_in_the_log(cluster: Cluster) -> None:
    ask(cluster, "light", "in-the-log")

    def lines() -> list[str]:
        return [line[line.index("{") :] for line in _log(cluster).splitlines() if '"in-the-log"' in line]

    wait_until(lines, "the line, which comes behind the answer")
    [line] = [json.loads(one) for one in lines()]
    assert (line["client"], line["replica"], line["outcome"], line["output_tokens"]) == (
        "light",
        "r0",
        "ok",
        4,
    )


def _log(cluster: Cluster) -> str:
    return Path(cluster.log).read_text()
