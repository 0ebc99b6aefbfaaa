"""Explained through the gateway: what gateway, router and a real replica say of one request, and to whom."""

import json
import subprocess
import sys
from typing import Any

import httpx
import pytest

from router.gateway.guard import KEY_VARIABLE
from sglang_fair.common.processes import child_environment
from tests.support.live import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("keyed")]

TIMEOUT_S = 60.0


def bearer(key: str, **more: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", **more}


def ask(keyed: Cluster, key: str, name: str, **body: Any) -> httpx.Response:
    body = {"prompt": "some words", "max_tokens": 4, "ignore_eos": True, **body}
    headers = bearer(key, **{"x-request-id": name})
    return httpx.post(f"{keyed.url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT_S)


def explained(url: str, key: str, id: str) -> httpx.Response:
    return httpx.get(f"{url}/explain/{id}", headers=bearer(key), timeout=TIMEOUT_S)


def test_a_request_is_explained_by_all_three(keyed: Cluster) -> None:
    answer = ask(keyed, "light", "my-request")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "my-request"
    attempt_id = answer.headers["x-fair-request-id"]
    for id in ("my-request", attempt_id):
        for url, key in ((keyed.url, "light"), (keyed.addresses["admin"], "the admin's key")):
            found = explained(url, key, id).json()
            [request] = found["requests"]
            assert found["router"] == ""
            assert (request["client"], request["outcome"], request["gateway"]) == ("light", "ok", True)
            assert request["tokens"]["output"] == 4
            [attempt] = request["attempts"]
            assert attempt["id"] == attempt_id
            assert attempt["router"]["worker"]["worker"] == attempt["worker"]
            [record] = attempt["replica"]
            assert (record["client"], record["outcome"], record["output_tokens"]) == ("light", "finished", 4)
            assert sum(record["waited_for_s"].values()) == pytest.approx(record["waited_s"])


def test_a_tenant_sees_only_its_own(keyed: Cluster) -> None:
    """Both call a request by one name."""
    for key in ("light", "heavy"):
        assert ask(keyed, key, "same-name").status_code == 200
    for key, other in (("light", "heavy"), ("heavy", "light")):
        text = explained(keyed.url, key, "same-name").text
        assert other not in text
        assert len(json.loads(text)["requests"]) == 1
    assert len(explained(keyed.addresses["admin"], "the admin's key", "same-name").json()["requests"]) == 2
    attempt = ask(keyed, "heavy", "heavys").headers["x-fair-request-id"]
    for id in ("heavys", attempt, "nobodys"):
        assert explained(keyed.url, "light", id).status_code == 404
    for url, key in ((keyed.url, "the admin's key"), (keyed.addresses["admin"], "light")):
        assert explained(url, key, "same-name").status_code == 401
    for replica in keyed.addresses["replicas"]:
        assert explained(replica, "light", attempt).status_code == 401


def test_the_command_says_it_in_words(keyed: Cluster) -> None:
    ask(keyed, "light", "in-words")
    environment = {**child_environment(), "OPENAI_API_KEY": "light"}
    environment.pop(KEY_VARIABLE, None)
    command = [sys.executable, "-m", "sglang_fair.cli", "explain", "in-words", "--gateway", keyed.url]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for words in ("request in-words of client light", "router: r", "replica: waited", "finished"):
        assert words in said
    found = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(found.stdout)["requests"][0]["request"] == "in-words"


def test_a_key_holder_sees_what_it_has_had_and_has_left(keyed: Cluster) -> None:
    for _ in range(2):
        ask(keyed, "light", "for-usage")
    usage = httpx.get(f"{keyed.url}/v1/usage", headers=bearer("light"), timeout=TIMEOUT_S).json()
    made = sum(book["clients"].get("light", {}).get("output_tokens", 0) for book in keyed.books())
    assert usage["client"] == "light"
    assert usage["weight"] == 3.0
    assert 4 <= usage["tokens"]["output"] <= made
    assert 0 < usage["share"] <= 1
    [limit] = usage["limits"]
    assert (limit["name"], limit["limit"]) == ("requests", 1000)
    assert limit["remaining"] < 1000
    assert "heavy" not in json.dumps(usage)
    assert httpx.get(f"{keyed.url}/v1/usage", timeout=TIMEOUT_S).status_code == 401
