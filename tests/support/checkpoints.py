"""Small checkpoints of one shape, with weights of their own: written without torch, in the format of safetensors."""

import json
import struct
from pathlib import Path

import numpy as np

from sglang_fair.models.catalog import RANDOM_LLAMAS

TINY = RANDOM_LLAMAS["tiny"]


def write(folder: Path, seed: int) -> Path:
    """A model like `tiny`, whose weights are drawn with `seed`. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    TINY.write(folder)
    write_weights(folder, seed)
    return folder


def write_weights(folder: Path, seed: int, name: str = "model.safetensors") -> Path:
    """The weights alone. Returns the file."""
    rng = np.random.default_rng(seed)
    header: dict[str, object] = {}
    data = bytearray()
    for tensor, shape in shapes().items():
        values = np.ones(shape) if len(shape) == 1 else rng.normal(0.0, 0.2, shape)
        raw = values.astype("<f4").tobytes()
        header[tensor] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    file = folder / name
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
    return file


def shapes() -> dict[str, tuple[int, ...]]:
    """Of each tensor, by name."""
    head = TINY.hidden // TINY.heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (TINY.vocabulary, TINY.hidden)}
    for layer in range(TINY.layers):
        at = f"model.layers.{layer}"
        found |= {
            f"{at}.self_attn.q_proj.weight": (TINY.heads * head, TINY.hidden),
            f"{at}.self_attn.k_proj.weight": (TINY.kv_heads * head, TINY.hidden),
            f"{at}.self_attn.v_proj.weight": (TINY.kv_heads * head, TINY.hidden),
            f"{at}.self_attn.o_proj.weight": (TINY.hidden, TINY.heads * head),
            f"{at}.mlp.gate_proj.weight": (TINY.intermediate, TINY.hidden),
            f"{at}.mlp.up_proj.weight": (TINY.intermediate, TINY.hidden),
            f"{at}.mlp.down_proj.weight": (TINY.hidden, TINY.intermediate),
            f"{at}.input_layernorm.weight": (TINY.hidden,),
            f"{at}.post_attention_layernorm.weight": (TINY.hidden,),
        }
    return found | {"model.norm.weight": (TINY.hidden,)}
