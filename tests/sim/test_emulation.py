"""What is emulated: memory, chunks and speed of a GPU with a model."""

import json
from pathlib import Path

import pytest

from sglang_fair.common.files import read_json
from sglang_fair.sim.cost_model import Fitted, Scaled, make_cost_model, to_json
from sglang_fair.sim.emulation import Emulation

A100 = Emulation("a100-80g", "llama-3.1-8b")


class TestEmulation:
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
