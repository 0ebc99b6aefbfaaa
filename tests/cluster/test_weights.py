"""How heavy a model is, by its files and by its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_fair.cluster.model import describe
from sglang_fair.cluster.weights import estimated_bytes, stored_bytes

LLAMA_8B = {
    "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "torch_dtype": "bfloat16",
}  # fmt: skip
MIXTRAL_8X7B = LLAMA_8B | {"vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN3_30B_A3B = {
    "num_hidden_layers": 48, "hidden_size": 2048, "vocab_size": 151936, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 129280, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
LLAMA_4_SCOUT = {
    "text_config": {
        "num_hidden_layers": 48, "hidden_size": 5120, "vocab_size": 202048, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_local_experts": 16, "interleave_moe_layer_step": 1, "torch_dtype": "bfloat16",
    },
    "vision_config": {
        "num_hidden_layers": 34, "hidden_size": 1408, "num_attention_heads": 16, "intermediate_size": 5632,
    },
}  # fmt: skip
GEMMA_3_27B = {
    "text_config": {
        "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 128, "intermediate_size": 21504,
    },
    "vision_config": {
        "num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 4304,
    },
}  # fmt: skip
GPT_OSS_120B = {
    "num_hidden_layers": 36, "hidden_size": 2880, "vocab_size": 201088, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 128,
    "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip

PUBLISHED: dict[str, tuple[dict[str, Any], float]] = {
    "dense": (LLAMA_8B, 16.1e9),
    "dense in 32 bits": (LLAMA_8B | {"torch_dtype": "float32"}, 32.1e9),
    "dense in 4 bits": (LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}}, 4.5e9),
    "experts": (MIXTRAL_8X7B, 93.4e9),
    "small experts": (QWEN3_30B_A3B, 61.1e9),
    "experts and latent attention in 8 bits": (DEEPSEEK_V3, 671e9),
    "experts in a nested configuration": (LLAMA_4_SCOUT, 218e9),
    "a nested configuration": (GEMMA_3_27B, 54.9e9),
    "experts in 4 bits": (GPT_OSS_120B, 65.2e9),
}
"""Configurations of the models' own, and their sizes as published: parameters times bytes."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_configuration_says_how_heavy_the_model_is(kind: str) -> None:
    config, published = PUBLISHED[kind]
    assert estimated_bytes(config) == pytest.approx(published, rel=0.12)


@pytest.mark.parametrize(
    "config",
    [{}, {"hidden_size": 12}, {"hidden_size": "wide", "num_hidden_layers": None}, {"text_config": {}}],
)
def test_one_that_says_nothing(config: dict[str, Any]) -> None:
    assert estimated_bytes(config) == 0


class TestFiles:
    def test_the_files_are_weighed(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        assert stored_bytes(tmp_path) == 0
        for part, size in (("1.safetensors", 300), ("2.safetensors", 50), ("pytorch_model.bin", 90)):
            (tmp_path / part).write_bytes(bytes(size))
        assert stored_bytes(tmp_path) == 350

    def test_the_index_says_what_is_not_there_yet(self, tmp_path: Path) -> None:
        index = {"metadata": {"total_size": 140_000_000_000}, "weight_map": {}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "model-00001.safetensors").write_bytes(bytes(10))
        assert stored_bytes(tmp_path) == 140_000_000_000

    def test_they_win_over_the_configuration(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
        (tmp_path / "tokenizer.json").write_text("{}")
        assert describe(str(tmp_path)).weights_bytes == pytest.approx(16.1e9, rel=0.01)
        (tmp_path / "model.safetensors").write_bytes(bytes(777))
        assert describe(str(tmp_path)).weights_bytes == 777
