"""What SGLang's own programs ask of a server, and what of a replica's answer may leave the gateway."""

from pathlib import Path

import pytest

from router.gateway import native
from router.gateway.native import HUB_ID
from tests.gateway.clusters import MODEL, Cluster, add_tenant, stand_ins
from tests.support import apis
from tests.support.waiting import eventually

OTHER = "other"
PATHS = {
    "/model_info": {
        "served_model_name": MODEL, "model_path": MODEL, "tokenizer_path": MODEL, "is_generation": True,
        "has_image_understanding": False, "has_audio_understanding": False, "model_type": "llama",
        "architectures": ["LlamaForCausalLM"], "weight_version": None,
    },
    "/server_info": {
        "served_model_name": MODEL, "model_path": MODEL, "tokenizer_path": MODEL, "version": "0.5.23",
        "max_total_num_tokens": 24576, "max_req_input_len": None,
        "internal_states": [
            {"dp_size": 1, "effective_max_running_requests_per_dp": None, "avg_spec_accept_length": None}
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
async def test_a_replica_tells_and_no_more_of_it_leaves_the_gateway(path: str, c: Cluster) -> None:
    for asked in (path, path.replace("/", "/get_"), f"{path}?model=default", f"{path}?model={MODEL}"):
        assert await c.get(asked) == (200, PATHS[path]), asked


async def test_names_of_the_hub_are_told_and_folders_are_not(
    c: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(apis.MODEL_INFO, "model_path", "meta-llama/Llama-3.1-8B-Instruct")
    told = (await c.get("/model_info"))[1]
    assert (told["model_path"], told["tokenizer_path"]) == ("meta-llama/Llama-3.1-8B-Instruct", MODEL)
    for path in ("/a", "a/b/c", "./a", "../a", "~/a", "a/../b", "s3://a/b", "C:\\a", ""):
        assert not HUB_ID.fullmatch(path), path


@pytest.mark.cluster(replicas=0, models=(MODEL, OTHER))
async def test_a_replica_of_the_model_is_asked_and_another_one_where_it_does_not_answer(
    c: Cluster, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "FRESH_S", 0.0)
    async with stand_ins(c, tokenizer, MODEL, OTHER, OTHER) as replicas:
        await replicas["r1"].close()
        status, told = await c.get(f"/model_info?model={OTHER}")
        assert (status, told["served_model_name"]) == (200, OTHER)
        await replicas["r2"].close()
        status, told = await c.get(f"/model_info?model={OTHER}")
        assert (status, told["error"]["code"]) == (503, "no_replica")
        assert (await c.get("/model_info"))[1]["served_model_name"] == MODEL
        assert (await c.get("/model_info?model=third"))[0] == 404


async def test_who_asks_often_has_the_same_answer(c: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FRESH_S", 1e9)
    assert await c.get("/server_info") == (200, PATHS["/server_info"])
    monkeypatch.setitem(apis.SERVER_INFO, "version", "later")
    assert await c.get("/server_info") == (200, PATHS["/server_info"])


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    add_tenant(path, "gold")
    add_tenant(path, "silver", models=[OTHER, f"{OTHER}:fine"])
    return path


@pytest.mark.cluster(models=(MODEL, OTHER), replicas=2)
async def test_a_tenant_hears_of_the_models_that_it_may_ask_for(tenants: Path, c: Cluster) -> None:
    asked = {"gold": {"authorization": "Bearer gold"}, "silver": {"authorization": "Bearer silver"}}
    assert (await c.get("/model_info", headers=asked["gold"]))[0] == 200
    assert (await c.get("/model_info", headers=asked["silver"]))[0] == 404
    status, told = await c.get(f"/model_info?model={OTHER}", headers=asked["silver"])
    assert (status, told["model_path"]) == (200, OTHER)
    status, told = await c.get(f"/model_info?model={OTHER}:fine", headers=asked["silver"])
    assert (status, told["served_model_name"]) == (200, f"{OTHER}:fine")


# -- the operators' side


@pytest.mark.cluster(replicas=2)
async def test_all_caches_are_emptied_or_it_is_said_which_are_not(c: Cluster) -> None:
    status, _, raw = await c.post("/flush_cache?timeout=2.5")
    assert (status, raw) == (200, b'{"workers":["r0","r1"]}')
    assert (await c.post("/flush_cache?timeout=601"))[0] == 400
    await c.replicas[1].close()
    await eventually(lambda: "r1" in c.gateway.replicas.sick(), "it is missed")
    status, _, raw = await c.post("/flush_cache")
    assert status == 409
    assert b"r1: NotConnected" in raw
    assert b"r0" not in raw
