"""How heavy a model's weights are, before anything of them is loaded: by its files, or else by its config.json.

Used for how long a replica may take to start, and for whether a machine without a GPU has room for it. So an answer
that is too large does little harm.
"""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
"""Files that name the parts of a divided checkpoint, and its size. Small checkpoints have none."""

SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")

BITS: Mapping[str, float] = {
    "fp8": 8,
    "mxfp8": 8,
    "mxfp4": 4.5,
    "nvfp4": 4.5,
    "modelopt_fp4": 4.5,
    "fp4": 4.5,
}
"""Of one weight, by its method of quantization; blocks of four bits have a scale each."""

FULL_BITS = 16


def stored_bytes(folder: Path) -> int:
    """Bytes of the checkpoint in `folder`, or that its index says it has; 0 if neither is there.

    A folder may hold the same weights in several formats: the largest counts.
    """
    sizes: Counter[str] = Counter()
    for file in folder.iterdir():
        if file.suffix in SUFFIXES and file.is_file():
            sizes[file.suffix] += file.stat().st_size
    for name in INDICES:
        if (index := folder / name).is_file():
            sizes[name] = _number(json.loads(index.read_text()).get("metadata") or {}, "total_size")
    return max(sizes.values(), default=0)


def estimated_bytes(config: Mapping[str, Any]) -> int:
    """Bytes of a transformer's weights by its config.json, within a tenth or so; 0 when that does not tell.

    Parts with a configuration of their own, as an encoder of images, are added up. Mixtures of experts and multi-head
    latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) are known. What is quantized is taken for all of it.
    """
    return round(_parameters(config) * _bits(config) / 8)


def _parameters(config: Mapping[str, Any]) -> int:
    inner = sum(_parameters(part) for part in config.values() if isinstance(part, Mapping))
    layers, hidden = _number(config, "num_hidden_layers", "n_layer"), _number(config, "hidden_size", "n_embd")
    heads = _number(config, "num_attention_heads", "n_head")
    if not (layers and hidden and heads):
        return inner
    embeddings = hidden * _number(config, "vocab_size") * (1 if config.get("tie_word_embeddings") else 2)
    return (
        inner + embeddings + layers * _attention(config, hidden, heads) + 3 * hidden * _widths(config, layers)
    )


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    """Parameters of one layer's attention."""
    if latent := _number(config, "kv_lora_rank"):
        plain, rotated = _number(config, "qk_nope_head_dim"), _number(config, "qk_rope_head_dim")
        value, query = _number(config, "v_head_dim"), _number(config, "q_lora_rank")
        queries = (
            query * (hidden + heads * (plain + rotated)) if query else hidden * heads * (plain + rotated)
        )
        return queries + hidden * (latent + rotated) + heads * (latent * (plain + value) + value * hidden)
    head = _number(config, "head_dim") or hidden // heads
    return hidden * head * (2 * heads + 2 * (_number(config, "num_key_value_heads") or heads))


def _widths(config: Mapping[str, Any], layers: int) -> int:
    """Sum of the widths of all feed-forward networks, those of all experts included."""
    width = _number(config, "intermediate_size", "n_inner") or 4 * _number(config, "hidden_size", "n_embd")
    experts = _number(
        config,
        "num_local_experts",
        "n_routed_experts",
        "num_experts",
        "num_routed_experts",
        "moe_num_experts",
    )
    if experts <= 1:
        return layers * width
    dense = _number(config, "first_k_dense_replace") + len(config.get("mlp_only_layers") or ())
    every = _number(config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq") or 1
    mixed = max(0, layers - dense) // every
    expert = _number(config, "moe_intermediate_size") or width
    shared = _number(config, "shared_expert_intermediate_size")
    shared = shared or expert * _number(config, "n_shared_experts", "num_shared_experts")
    plain = _number(config, "intermediate_size_mlp") or width
    return mixed * (experts * expert + shared) + (layers - mixed) * plain


def _bits(config: Mapping[str, Any]) -> float:
    """Of one weight as it is stored."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        if bits := _number(quantized, "bits"):
            return bits + 0.5
        return BITS.get(str(quantized.get("quant_method")), FULL_BITS)
    text = config.get("text_config")
    parts = (config, text if isinstance(text, Mapping) else {})
    kinds = {str(part.get(key)) for part in parts for key in ("dtype", "torch_dtype")}
    return 32 if "float32" in kinds else FULL_BITS


def _number(config: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a whole number above 0; of a list the largest, as of experts by modality. 0: none."""
    for name in names:
        value = config.get(name)
        if isinstance(value, list):
            value = max((each for each in value if isinstance(each, int)), default=0)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0
