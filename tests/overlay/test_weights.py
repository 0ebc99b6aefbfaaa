"""Client weights change while the server runs: what was counted stays, what comes is charged by the new ones."""

import random
from typing import Any

import httpx
import pytest

from sglang_fair.common.caller import HEADER_WEIGHT, salted
from sglang_fair.overlay.status import to_settings
from tests.overlay.test_charges import idle, prompt
from tests.support.live import Replica

pytestmark = pytest.mark.engine


def post(replica: Replica, body: Any, **how: Any) -> httpx.Response:
    how = how or {"json": body}
    return httpx.post(f"{replica.url}/fair", timeout=30, **how)


def test_new_weights_charge_from_then_on_and_lose_nothing(under_pressure: Replica) -> None:
    """A client in debt gets weight 4, is served again, and pays a quarter of it, into the same counter."""
    replica, rng = under_pressure, random.Random(5)
    client = "promoted"
    replica.flush()
    replica.generate(client, prompt(rng, 600), 5)
    first = idle(replica)
    assert first["clients"][client]["counter"] < 0
    assert first["config"]["cost"] == "linear:extend_weight=1.0,output_weight=2.0"

    answer = post(replica, {"client_weights": {client: 4, "elsewhere": 0.5}})
    assert answer.status_code == 200, answer.text
    changed = answer.json()
    assert changed["config"]["client_weights"] == {client: 4.0, "elsewhere": 0.5}
    assert changed["clients"][client].pop("weight") == 4.0
    assert first["clients"][client].pop("weight") == 1.0
    for what in ("clients", "totals", "conservation", "policy"):
        assert changed[what] == first[what], "only the weights differ"

    replica.generate(client, prompt(rng, 1800), 5)
    second = idle(replica)
    assert second["clients"][client]["service"] == 610 + 1810, "service is counted as it is"
    before, after = first["clients"][client]["counter"], second["clients"][client]["counter"]
    quantum = second["config"]["quantum"]
    assert (before - after) % quantum == pytest.approx(1810 / 4), "but for rounds that passed"
    assert second["bound"] > first["bound"], "the smallest weight is in the bound"

    assert post(replica, {"client_weights": {client: 1, "elsewhere": 1}}).status_code == 200


def test_bad_weights_are_refused_and_change_nothing(under_pressure: Replica) -> None:
    replica = under_pressure
    before = replica.fair()["config"]
    answer = post(replica, {"client_weights": {"ok": 2, "gold": 0}})
    assert answer.status_code == 400, answer.text
    assert "weight of client 'gold' must be a positive number" in answer.json()["message"]
    for content in (b"{gold: 2", b'{"client_weights": {"gold": NaN}}', b"\xff\xfe"):
        assert post(replica, None, content=content).status_code == 400
    assert replica.fair()["config"] == before


def test_sglangs_own_settings_still_go_through(under_pressure: Replica) -> None:
    def set_state(settings: dict[str, float]) -> Any:
        return httpx.post(
            f"{under_pressure.url}/set_internal_state", json={"server_args": settings}, timeout=30
        ).json()

    assert set_state({"pp_max_micro_batch_size": 8}) == [True]
    assert set_state({"nothing_of_the_kind": 8}) == [False]
    weight = to_settings({"by-the-back-door": 2.0})
    assert set_state({**weight, "nothing_of_the_kind": 8}) == [False]
    assert set_state(to_settings({"by-the-back-door": -2.0})) == [False]
    assert "by-the-back-door" not in under_pressure.fair()["config"]["client_weights"]
    assert set_state({**weight, "pp_max_micro_batch_size": 9}) == [True]
    assert under_pressure.fair()["config"]["client_weights"]["by-the-back-door"] == 2.0


def weight_of(replica: Replica, client: str) -> float:
    weight: float = replica.fair()["clients"][client]["weight"]
    return weight


def test_requests_bring_the_weight_and_the_later_file_wins(under_pressure: Replica) -> None:
    replica, rng = under_pressure, random.Random(6)
    assert post(replica, {"client_weights": {"brought": 8}}).status_code == 200
    for told, weight in (("3.0@5", 3.0), ("9.0@4", 3.0), ("nonsense", 3.0), ("-7.0@9", 3.0), ("4.0@7", 4.0)):
        replica.generate("brought", prompt(rng, 20), headers={HEADER_WEIGHT: told})
        assert weight_of(replica, "brought") == weight, told
    replica.generate("brought", prompt(rng, 20))
    assert weight_of(replica, "brought") == 4.0, "who says nothing changes nothing"
    assert post(replica, {"client_weights": {"brought": 1}}).status_code == 200


def test_who_is_not_named_by_a_gateway_brings_none(under_pressure: Replica) -> None:
    """A key or a user's name is the sender's own, and the header beside it then is too."""
    url = f"{under_pressure.url}/generate"
    asked = {"input_ids": [5] * 20, "sampling_params": {"max_new_tokens": 1}}
    for headers in ({"x-tenant-id": "own name"}, {}):
        answer = httpx.post(url, json=asked, headers={HEADER_WEIGHT: "99.0@99", **headers}, timeout=60)
        assert answer.status_code == 200
        assert weight_of(under_pressure, headers.get("x-tenant-id", "anonymous")) == 1.0


# ---- cache groups


def test_groups_share_no_prefix_and_count_none_as_shared(under_pressure: Replica) -> None:
    replica, rng = under_pressure, random.Random(9)
    replica.flush()
    tokens = prompt(rng, 200)

    def cached(client: str, salt: str | None, **body: object) -> int:
        return replica.generate(client, tokens, 1, cache_salt=salt, **body).cached_tokens

    assert cached("a", salted("one", None)) == 0
    assert cached("b", salted("one", None)) >= 190, "the other tenant of the group"
    for salt in (salted("two", None), None, salted("one", "own"), salted(None, "one"), salted(None, "other")):
        assert cached("c", salt) == 0, salt
        assert cached("c", salt) >= 190, salt
    books = idle(replica)
    assert books["conservation"]["ok"]


def test_no_body_straight_to_a_replica_reaches_into_a_group(under_pressure: Replica) -> None:
    replica, rng = under_pressure, random.Random(10)
    replica.flush()
    tokens = prompt(rng, 200)
    assert replica.generate("a", tokens, 1, cache_salt=salted("one", None)).cached_tokens == 0
    asked = {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}}
    forged = salted("one", None)
    for number, body in enumerate(
        (
            {"cache_salt": forged},
            {"input_ids": [tokens], "cache_salt": [forged]},
            {"cache_salt": forged, "extra_key": "k"},
        )
    ):
        named = {"x-tenant-id": f"thief {number}"}
        answer = httpx.post(f"{replica.url}/generate", json=asked | body, headers=named, timeout=60)
        assert answer.status_code == 200, answer.text
        thieves = replica.fair()["clients"]
        hits = thieves[f"thief {number}"]["cached_tokens"]
        assert hits < 190 if number != 1 else hits >= 190, "the second finds what the first had computed"
    assert replica.generate("b", tokens, 1, cache_salt=salted("one", None)).cached_tokens >= 190
