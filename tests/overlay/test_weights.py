"""Client weights change while the server runs: what was counted stays, what comes is charged by the new ones."""

import random
from typing import Any

import httpx
import pytest

from sglang_fair.overlay.status import from_settings, to_settings
from tests.overlay.test_charges import idle, prompt
from tests.support.live import Replica

pytestmark = pytest.mark.engine


def post(replica: Replica, body: Any, **how: Any) -> httpx.Response:
    how = how or {"json": body}
    return httpx.post(f"{replica.url}/fair", timeout=30, **how)


def test_weights_pass_through_sglangs_request_beside_its_own_settings() -> None:
    weights = {"gold": 2.0, "sglang_fair.client_weight:": 3.0}
    assert from_settings(to_settings(weights)) == (weights, {})
    both = {**to_settings({"gold": 2.0}), "pp_max_micro_batch_size": 4}
    assert from_settings(both) == ({"gold": 2.0}, {"pp_max_micro_batch_size": 4})


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
    for body, said in (
        ({"client_weights": {"ok": 2, "gold": 0}}, "weight of client 'gold' must be a positive number"),
        ({"client_weights": {"x" * 129: 1}}, "a client's name has 1 to 128 characters"),
        ({"client_weights": {"gold": 2}, "quantum": 9}, "cannot change 'quantum'"),
        ([], "must be a JSON object"),
    ):
        answer = post(replica, body)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["message"]
    assert post(replica, None, content=b"{gold: 2").status_code == 400
    assert post(replica, None, content=b'{"client_weights": {"gold": NaN}}').status_code == 400
    assert post(replica, None, content=b"\xff\xfe").status_code == 400
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
