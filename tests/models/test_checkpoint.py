"""Whether models can share a server is known before one is started."""

import json
from pathlib import Path

import pytest

from sglang_fair.models import checkpoint
from tests.support import checkpoints


@pytest.fixture
def two(tmp_path: Path) -> dict[str, Path]:
    return {name: checkpoints.write(tmp_path / name, seed) for seed, name in enumerate("ab")}


def refused(folders: dict[str, Path]) -> str:
    with pytest.raises(ValueError) as error:
        checkpoint.alike(folders)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_models_of_one_shape_can_share_a_server(two: dict[str, Path]) -> None:
    found = checkpoint.alike(two)
    assert found["a"].tensors == found["b"].tensors
    assert found["a"].bytes == (two["a"] / "model.safetensors").stat().st_size
    config = two["b"] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "_name_or_path": "elsewhere"}))
    checkpoint.alike(two)
    checkpoint.read_ahead(found["a"])


def test_another_shape_or_tokenizer_is_refused(two: dict[str, Path]) -> None:
    config = two["b"] / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    assert refused(two) == (
        "models a and b cannot share a replica: config.json differs, and SGLang keeps the first one's"
    )
    config.write_text(kept)
    (two["b"] / "tokenizer.json").write_text("{}")
    assert "tokenizer.json differs" in refused(two)
    (two["b"] / "tokenizer.json").unlink()
    assert "tokenizer.json differs" in refused(two)


def test_another_set_of_tensors_is_refused(two: dict[str, Path]) -> None:
    checkpoints.write_weights(two["b"], 3, "more.safetensors")
    (two["b"] / "more.safetensors").write_bytes(
        (two["b"] / "more.safetensors").read_bytes().replace(b"model.norm.weight", b"model.norm.WEIGHT")
    )
    assert "only one of them has the tensor model.norm.WEIGHT" in refused(two)


def test_weights_that_are_missing_or_damaged_are_refused(two: dict[str, Path]) -> None:
    weights = two["b"] / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert f"{weights} is damaged" in refused(two)
    weights.write_bytes(whole + b"x")
    assert "should have" in refused(two)
    weights.write_bytes(b"\xff" * 100)
    assert "is damaged" in refused(two)
    weights.write_bytes(whole[:8] + b"x" + whole[9:])
    assert "is damaged" in refused(two)
    weights.unlink()
    assert f"model b: {two['b']} has no weights (*.safetensors)" == refused(two)
    (two["b"] / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"x": "gone.safetensors"}})
    )
    assert "gone.safetensors is missing" in refused(two)
    (two["b"] / "model.safetensors.index.json").write_text("[]")
    assert "cannot be read" in refused(two)
    (two["b"] / "config.json").unlink()
    assert "has no config.json" in refused(two)
