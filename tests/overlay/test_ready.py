"""When a replica says that it is ready."""

import httpx
import pytest

from tests.support.live import Replica

pytestmark = pytest.mark.engine


def test_one_that_is_paused_is_ready_only_between_two_models(one_at_a_time: Replica) -> None:
    """Whoever pauses it by himself wants no requests there. Its agent does so behind a gate that refuses them."""
    url = one_at_a_time.url

    def ready() -> int:
        return httpx.get(f"{url}/ready", timeout=60).status_code

    def gate(state: str, model: str) -> None:
        told = httpx.post(f"{url}/fair/model", json={"state": state, "model": model}, timeout=60)
        assert told.status_code == 200

    has = httpx.get(f"{url}/fair/model", timeout=60).json()["loaded"]
    assert ready() == 200
    try:
        paused = httpx.post(f"{url}/pause_generation", json={"mode": "retract"}, timeout=60)
        assert paused.status_code == 200
        assert ready() == 503
        gate("loads", "another")
        assert ready() == 200
        gate("serves", has)
        assert ready() == 503
    finally:
        httpx.post(f"{url}/continue_generation", json={}, timeout=60)
    assert ready() == 200
